/* Feed-forward experts. */

#define PAIR_BLOCK 48

struct expert {
    const float *gate_up; /* [2 · inner, width], gate rows first */
    const float *down;    /* [width, inner] */
    int64_t width, inner;
    float limit;
    const struct format *rounding; /* of both matrices' inputs; null: none */
};

/* x [rows, width], already rounded -> out [rows, width]; `room` holds rows · 3 · inner numbers. */
static void expert_rows(const struct expert *e, const float *x, float *out, float *room, int64_t rows) {
    float *hidden = room, *active = room + rows * 2 * e->inner;
    products(x, e->width, e->gate_up, hidden, 2 * e->inner, rows, e->width, 2 * e->inner);
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = hidden + row * 2 * e->inner, *up = gate + e->inner;
        float *to = active + row * e->inner;
        for (int64_t i = 0; i < e->inner; i++) {
            float g = gate[i] > e->limit ? e->limit : gate[i], u = up[i] > e->limit ? e->limit : up[i];
            u = u < -e->limit ? -e->limit : u;
            to[i] = g / (exponential(-g) + 1.0f) * u;
        }
    }
    if (e->rounding) round_trip(e->rounding, active, active, rows, e->inner);
    products(active, e->inner, e->down, out, e->width, rows, e->inner, e->width);
}

/* x [rows, width] -> [rows, width]. `group` 0: inputs are not rounded. 0: no memory. */
int whalepod_dense_expert(const float *x, const float *gate_up, const float *down, float *out, int64_t rows, int64_t width,
                          int64_t inner, float limit, int64_t four_bits, int64_t power, int64_t group, float amax_min) {
    struct format f = {four_bits, power, group, amax_min};
    struct expert e = {gate_up, down, width, inner, limit, group ? &f : 0};
    float *room = malloc((size_t)(PAIR_BLOCK * (3 * inner + width)) * sizeof *room);
    if (!room) return 0;
    float *rounded = room + PAIR_BLOCK * 3 * inner;
    for (int64_t first = 0; first < rows; first += PAIR_BLOCK) {
        int64_t some = rows - first < PAIR_BLOCK ? rows - first : PAIR_BLOCK;
        const float *own = x + first * width;
        if (group) round_trip(&f, own, rounded, some, width);
        expert_rows(&e, group ? rounded : own, out + first * width, room, some);
    }
    free(room);
    return 1;
}

/* Pairs of a row of x and an expert, sorted by expert: expert e's are order[starts[e]] … order[starts[e + 1] - 1]. 0: there
 * is no such expert. */
static int sort_pairs(const int64_t *chosen, int64_t pairs, int64_t experts, int64_t *starts, int64_t *order) {
    memset(starts, 0, (size_t)(experts + 1) * sizeof *starts);
    for (int64_t p = 0; p < pairs; p++) {
        if (chosen[p] < 0 || chosen[p] >= experts) return 0;
        starts[chosen[p] + 1]++;
    }
    for (int64_t e = 0; e < experts; e++) starts[e + 1] += starts[e];
    for (int64_t p = 0; p < pairs; p++) order[starts[chosen[p]]++] = p;
    for (int64_t e = experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
    return 1;
}

/* x [.., width], row_of and chosen [pairs], gate_up [experts, 2 · inner, width], down [experts, width, inner] ->
 * out [pairs, width]: what each pair's expert makes of its row. Without row_of, pairs of `each` belong to one row after the
 * other. 0: no memory, or no such expert. */
int whalepod_expert_pairs(const float *x, const int64_t *row_of, const int64_t *chosen, const float *gate_up,
                          const float *down, float *out, int64_t pairs, int64_t each, int64_t experts, int64_t width,
                          int64_t inner, float limit, int64_t four_bits, int64_t power, int64_t group, float amax_min) {
    struct format f = {four_bits, power, group, amax_min};
    int64_t *starts = malloc((size_t)(experts + 1 + pairs) * sizeof *starts), *order = starts + experts + 1;
    float *room = malloc((size_t)(PAIR_BLOCK * (3 * inner + 2 * width)) * sizeof *room);
    if (!starts || !room || !sort_pairs(chosen, pairs, experts, starts, order)) {
        free(starts);
        free(room);
        return 0;
    }
    float *gathered = room + PAIR_BLOCK * 3 * inner, *made = gathered + PAIR_BLOCK * width;
    for (int64_t expert = 0; expert < experts; expert++) {
        struct expert e = {gate_up + expert * 2 * inner * width, down + expert * width * inner, width, inner, limit,
                           group ? &f : 0};
        for (int64_t first = starts[expert]; first < starts[expert + 1]; first += PAIR_BLOCK) {
            int64_t left = starts[expert + 1] - first, some = left < PAIR_BLOCK ? left : PAIR_BLOCK;
            for (int64_t i = 0; i < some; i++) {
                int64_t pair = order[first + i], row = row_of ? row_of[pair] : pair / each;
                memcpy(gathered + i * width, x + row * width, (size_t)width * sizeof *x);
            }
            if (group) round_trip(&f, gathered, gathered, some, width);
            expert_rows(&e, gathered, made, room, some);
            for (int64_t i = 0; i < some; i++)
                memcpy(out + order[first + i] * width, made + i * width, (size_t)width * sizeof *x);
        }
    }
    free(starts);
    free(room);
    return 1;
}
