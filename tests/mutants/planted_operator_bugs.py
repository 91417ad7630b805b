"""Bugs that someone could write into the compiled operators."""

from __future__ import annotations

from tests.mutants.planted_bug import PlantedBug

OPERATOR_BUGS = (
    PlantedBug(
        "operators: products take every second vector twice",
        "kernels/native/products.c",
        "low[i] = plus(low[i], high[i]);",
        "low[i] = plus(low[i], low[i]);",
    ),
    PlantedBug(
        "operators: transposed mixing matrix",
        "kernels/native/streams.c",
        "* count + k] = m[i][k][lane];",
        "* count + k] = m[k][i][lane];",
    ),
    PlantedBug(
        "operators: one normalisation round short",
        "kernels/native/streams.c",
        "iteration < iterations; iteration++",
        "iteration + 1 < iterations; iteration++",
    ),
    PlantedBug(
        "operators: neighbours share the shift of a softmax",
        "kernels/native/streams.c",
        "exponential(m[i][k][lane] - highest)",
        "exponential(m[i][k][lane] - m[i][0][0])",
    ),
    PlantedBug(
        "operators: gate without a sign",
        "kernels/native/streams.c",
        "sigmoid(near < 0 ? -magnitude : magnitude)",
        "sigmoid(magnitude)",
    ),
    PlantedBug("operators: images remember n-grams", "kernels/native/streams.c", "text && !text[row] ? 0.0f : ", ""),
    PlantedBug(
        "operators: rotation the other way",
        "kernels/native/rows.c",
        "add_product(from[i + 1], b[i], from[i] * a[i]);",
        "add_product(from[i + 1], -b[i], from[i] * a[i]);",
    ),
    PlantedBug(
        "operators: the oldest token of a group alone",
        "kernels/native/rows.c",
        "weighted = add_product(share, value[t * width], weighted);",
        "weighted = add_product(share, value[0], weighted);",
    ),
    PlantedBug(
        "operators: missing sink",
        "kernels/native/attention.c",
        "return sum(total) + exponential(sink - highest);",
        "return sum(total);",
    ),
    PlantedBug(
        "operators: keys that are not valid count",
        "kernels/native/attention.c",
        "if (valid[row * count + j]) own",
        "own",
    ),
    PlantedBug(
        "operators: negative head scores count",
        "kernels/native/products.c",
        "times(not_negative(products[e]), own)",
        "times(products[e], own)",
    ),
    PlantedBug(
        "operators: candidate block off by one",
        "kernels/native/choices.c",
        "newest = (visible[row] - 1) / block;",
        "newest = visible[row] / block;",
    ),
    PlantedBug(
        "operators: the best entries but one",
        "kernels/native/choices.c",
        "nth_largest(room, some, count)",
        "nth_largest(room, some, count > 1 ? count - 1 : 1)",
    ),
    PlantedBug("operators: bias used as weight", "kernels/native/choices.c", "share[k] = score;", "share[k] = biased;"),
    PlantedBug(
        "operators: the gate is clamped on both sides",
        "kernels/native/experts.c",
        "to[i] = g / (exponential(-g) + 1.0f) * u;",
        "g = g < -e->limit ? -e->limit : g;\n            to[i] = g / (exponential(-g) + 1.0f) * u;",
    ),
    PlantedBug(
        "operators: nibbles swapped when read",
        "kernels/native/records.c",
        ">> (i & 1 ? 4 : 0) & 15]",
        ">> (i & 1 ? 0 : 4) & 15]",
    ),
    PlantedBug("operators: ties round up", "kernels/native/records.c", "(a > 1.25f)", "(a >= 1.25f)"),
    PlantedBug(
        "operators: scales of exact powers are doubled",
        "kernels/native/records.c",
        "+ 0x7FFFFF) >> 23",
        "+ 0x800000) >> 23",
    ),
)
