"""`vision`, `vl`, `image_grid` sets: how large images are, what becomes of their pixels, a prompt with images."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import VisionConfig
from .conformity import Comparison, Vectors
from .conformity_engram import table_rows
from .conformity_folder import Mode, VectorFolder
from .conformity_rows import PromptRun, compare_choice, compare_logits, token_list
from .engram_token_map import engram_token_map
from .tokenizer import Tokenizer
from .vision.grid import ImageGrid
from .vision.pixels import Patches, patches_of_rgb

RELEASED = VisionConfig(
    num_hidden_layers=32,
    hidden_size=1024,
    num_attention_heads=16,
    intermediate_size=2816,
    patch_size=14,
    downsample_ratio=3,
    max_image_tokens=1024,
    min_pixels=295936,
)
"""`vision_config` of the release (`model.md` §1.3)."""
FIRST_IMAGE, TEXT = 0, -1
"""Of `token_types`: an image's start, and what is no image."""


def check_image_grid(c: Comparison, vectors: Vectors, folder: VectorFolder) -> None:
    """`{settings}.plan`: [width, height, token rows, token columns, pixel height, pixel width]; `tiny.rgb_patches`."""
    tiny = next(config.vision_config for config in folder.checkpoints.values())
    if tiny is None:
        c.fail("the checkpoint has no vision_config")
        return
    for name, config in (("released", RELEASED), ("tiny", tiny)):
        wanted = vectors[f"{name}.plan"]
        grids = [ImageGrid.fit(width, height, config) for width, height in wanted[:, :2].tolist()]
        got = [[grid.rows, grid.columns, grid.height, grid.width] for grid in grids]
        c.equal(f"{name} plan", torch.tensor(got), wanted[:, 2:])
    patches = patches_of_rgb(vectors["tiny.rgb"].numpy(), tiny)
    c.equal("grid", _grid_row(patches.grid), vectors["tiny.rgb_grid"])
    c.floats("patches", patches.values.float(), vectors["tiny.rgb_patches"], tolerance=0.0)


def check_vision(c: Comparison, vectors: Vectors, folder: VectorFolder, mode: Mode) -> None:
    """`img{i}`: the tower's blocks and the aligner's rows, each image alone and all in one batch."""
    encoder, names = folder.vision_encoder(mode), vectors.heads()
    images = [_image(vectors.below(f"{name}."), encoder.config) for name in names]
    batch = encoder.embeddings(images)
    for name, image, together in zip(names, images, batch, strict=True):
        recorded, wanted = dict[str, Tensor](), vectors.below(f"{name}.")
        (alone,) = encoder.embeddings([image], recorder=recorded.__setitem__)
        for stage, array in wanted.arrays.items():
            if stage.startswith("vit_"):
                c.floats(f"{name} {stage}", recorded[stage], array)
        c.floats(f"{name} embeddings", alone, wanted["embeddings"])
        c.floats(f"{name} embeddings in a batch", together, alone.cpu(), tolerance=0.0)


def check_image_prompt(c: Comparison, vectors: Vectors, folder: VectorFolder, mode: Mode) -> None:
    """A prompt with the first images of the `vision` set, computed at once and in chunks that cut their spans, then
    text token by token."""
    encoder, network = folder.vision_encoder(mode), folder.network(mode)
    pictures = Vectors.load(folder.path / "vision_f32.safetensors")
    starts = (vectors["token_types"] == FIRST_IMAGE).nonzero().flatten().tolist()
    images = [_image(pictures.below(f"img{index}."), encoder.config) for index in range(len(starts))]
    spans = dict(zip(starts, encoder.encode(images), strict=True))
    _check_roles(c, vectors["token_types"], images)
    ids, after = token_list(vectors, "ids"), token_list(vectors, "decode.ids")
    run, recorded = PromptRun(network, mode, [*ids, *after], images=spans), dict[str, Tensor]()
    pairs = [("logits", run.rows(0, len(ids), recorder=recorded.__setitem__), vectors["logits"])]
    decoded = [run.rows(position, position + 1) for position in range(len(ids), len(run.ids))]
    pairs.append(("decode", torch.cat(decoded), vectors["decode.logits"]))
    chunked = PromptRun(network, mode, [*ids, *after], images=spans)
    rows = [chunked.rows(start, min(start + 3, len(ids))) for start in range(0, len(ids), 3)]
    pairs.append(("in chunks of 3", torch.cat(rows), vectors["logits"]))
    compare_logits(c, pairs, mode, device=network.device)
    if not mode.rounded:
        for name in vectors.arrays:
            if name.endswith("expert_ids"):
                compare_choice(c, name, recorded.get(name), vectors[name])
        _check_rows(c, vectors, folder, mode, run.ids)


def _check_roles(c: Comparison, types: Tensor, images: list[Patches]) -> None:
    """Which token of a span is what: 0 start, 1 image, 2 end of row, 3 end."""
    wanted = [role for image in images for role in (0, *([*[1] * image.grid.columns, 2] * image.grid.rows), 3)]
    c.equal("token_types", torch.tensor(wanted), types[types != TEXT])


def _check_rows(c: Comparison, vectors: Vectors, folder: VectorFolder, mode: Mode, ids: list[int]) -> None:
    """Table rows of text tokens: images do not count as what stood before them."""
    checkpoint = folder.checkpoint(mode)
    config = folder.checkpoints[checkpoint.name]
    token_map = engram_token_map(Tokenizer.from_dir(checkpoint), config)
    rows = table_rows(torch.tensor(ids), config, token_map)
    text = torch.tensor(ids) != config.image_token_id
    wanted = torch.cat((vectors["engram_rows"], vectors["decode.engram_rows"]))
    c.equal("engram_rows", rows[text], wanted[text])


def _image(vectors: Vectors, config: VisionConfig) -> Patches:
    patch_rows, patch_columns, rows, columns = vectors["grid"].tolist()
    patch = config.patch_size
    grid = ImageGrid(patch_columns * patch, patch_rows * patch, patch_rows, patch_columns, rows, columns)
    return Patches(vectors["patches"], grid)


def _grid_row(grid: ImageGrid) -> Tensor:
    return torch.tensor([grid.patch_rows, grid.patch_columns, grid.rows, grid.columns])
