#!/bin/sh
# The steps of both images, each a layer of its own; run in the root of the sources. $PREFIX is the virtual environment.
#
#   build.sh requirements [EXTRA]   what pyproject.toml names, in the versions of constraints.txt
#   build.sh package                Whalepod itself, and a short way to the model that ships
#   build.sh kernels [ARGUMENT…]    every GPU kernel, compiled into $TRITON_CACHE_DIR; arguments: model/kernel_cache.py
#   build.sh check                  versions fit together, the command starts, the compiled operators are there
set -eu

requirements() {
    [ -x "$PREFIX/bin/python" ] || python3 -m venv "$PREFIX"
    if [ -n "${TORCH_INDEX:-}" ]; then
        "$PREFIX/bin/pip" install --index-url "$TORCH_INDEX" --no-deps "$(grep '^torch==' constraints.txt)"
    fi
    "$PREFIX/bin/python" deploy/docker/requirements.py "$@" > "$PREFIX/requirements.txt"
    "$PREFIX/bin/pip" install --constraint constraints.txt --requirement "$PREFIX/requirements.txt"
}

package() {
    "$PREFIX/bin/pip" install --no-deps --no-build-isolation .
    # Outside the sources: there the folders would be found, and not what is installed.
    model=$(cd / && "$PREFIX/bin/python" -c \
        'from whalepod.cluster.shipped_model import shipped_model_dir; print(shipped_model_dir())')
    mkdir -p "$PREFIX/models"
    ln -sfn "$model" "$PREFIX/models/$(basename "$model")"
}

kernels() {
    cd /
    "$PREFIX/bin/python" -m whalepod.kernels.compilation
    "$PREFIX/bin/python" -m whalepod.model.kernel_cache "$@"
}

check() {
    "$PREFIX/bin/pip" check
    cd /
    "$PREFIX/bin/whalepod" --version
    "$PREFIX/bin/python" -c 'from whalepod.kernels.native import library; assert library.available()'
}

step=$1
shift
"$step" "$@"
