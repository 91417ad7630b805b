/* Rows times matrices. A result is the product of its own row and matrix row, summed as `dot` does: its bits depend on
 * nothing else. */

#define ROW_BLOCK 24 /* rows whose numbers stay in the nearest cache while the matrix passes */

/* `r` rows of x times `o` rows of the matrix, at most six results; both are constants where it is called. */
INLINE void tile(const int r, const int o, const float *x, int64_t x_step, const float *matrix, int64_t matrix_step,
                 float *out, int64_t out_step, int64_t width) {
    lanes low[8], high[8];
    float sums[8];
    for (int i = 0; i < 8; i++) low[i] = high[i] = zeros();
    int64_t at = 0;
    for (; at + 2 * LANES <= width; at += 2 * LANES) {
        lanes own[2 * 3];
#pragma GCC unroll 3
        for (int i = 0; i < r; i++) {
            own[2 * i] = load(x + i * x_step + at);
            own[2 * i + 1] = load(x + i * x_step + at + LANES);
        }
#pragma GCC unroll 4
        for (int j = 0; j < o; j++) {
            lanes one = load(matrix + j * matrix_step + at), other = load(matrix + j * matrix_step + at + LANES);
#pragma GCC unroll 3
            for (int i = 0; i < r; i++) {
                low[i * o + j] = fused(own[2 * i], one, low[i * o + j]);
                high[i * o + j] = fused(own[2 * i + 1], other, high[i * o + j]);
            }
        }
    }
    for (int part = 0; at < width; part++, at += LANES) { /* less than sixteen channels are left */
        int64_t some = width - at < LANES ? width - at : LANES;
        for (int i = 0; i < r; i++)
            for (int j = 0; j < o; j++) {
                lanes *total = (part ? high : low) + i * o + j;
                *total = fused(load_some(x + i * x_step + at, some), load_some(matrix + j * matrix_step + at, some), *total);
            }
    }
#pragma GCC unroll 8
    for (int i = 0; i < r * o; i++) low[i] = plus(low[i], high[i]);
    sum_4(sums, low);
    if (r * o > 4) sum_4(sums + 4, low + 4);
    for (int i = 0; i < r; i++)
        for (int j = 0; j < o; j++) out[i * out_step + j] = sums[i * o + j];
}

/* x [rows, width] (rows x_step apart), matrix [outs, width] -> out [rows, outs] (rows out_step apart). */
static void products(const float *x, int64_t x_step, const float *matrix, float *out, int64_t out_step, int64_t rows,
                     int64_t width, int64_t outs) {
    for (int64_t first = 0; first < rows; first += ROW_BLOCK) {
        int64_t last = first + ROW_BLOCK < rows ? first + ROW_BLOCK : rows, o = 0;
        if (last - first == 1)
            for (; o + 4 <= outs; o += 4)
                tile(1, 4, x + first * x_step, x_step, matrix + o * width, width, out + first * out_step + o, out_step, width);
        for (; o + 2 <= outs; o += 2) {
            int64_t row = first;
            for (; row + 3 <= last; row += 3)
                tile(3, 2, x + row * x_step, x_step, matrix + o * width, width, out + row * out_step + o, out_step, width);
            for (; row < last; row++)
                tile(1, 2, x + row * x_step, x_step, matrix + o * width, width, out + row * out_step + o, out_step, width);
        }
        for (; o < outs; o++)
            for (int64_t row = first; row < last; row++)
                tile(1, 1, x + row * x_step, x_step, matrix + o * width, width, out + row * out_step + o, out_step, width);
    }
}

/* x [rows, groups, width], matrices [groups, outs, width] -> [rows, groups, outs]. */
void whalepod_linear(const float *x, const float *matrices, float *out, int64_t rows, int64_t groups, int64_t width,
                     int64_t outs) {
    for (int64_t g = 0; g < groups; g++)
        products(x + g * width, groups * width, matrices + g * outs * width, out + g * outs, groups * outs, rows, width, outs);
}

/* Index scores: queries [rows, heads, width], weights [rows, heads], keys [entries, width] -> [rows, entries]. Heads lie
 * in lanes, and each lane sums over the channels from the first. 0: no memory. */
int whalepod_index_scores(const float *queries, const float *weights, const float *keys, float *out, int64_t rows,
                          int64_t heads, int64_t width, int64_t entries) {
    int64_t groups = (heads + LANES - 1) / LANES, padded = groups * LANES;
    float *turned = calloc((size_t)(padded * (width + 1)), sizeof *turned), *share = turned + padded * width;
    if (!turned) return 0;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t h = 0; h < heads; h++) {
            share[h] = weights[row * heads + h];
            for (int64_t i = 0; i < width; i++) turned[i * padded + h] = queries[(row * heads + h) * width + i];
        }
        for (int64_t entry = 0; entry < entries; entry += 4) {
            int64_t count = entries - entry < 4 ? entries - entry : 4;
            const float *key[4];
            lanes totals[4];
            float scores[4];
            for (int64_t e = 0; e < 4; e++) {
                key[e] = keys + (entry + (e < count ? e : 0)) * width;
                totals[e] = zeros();
            }
            for (int64_t g = 0; g < groups; g++) {
                lanes products[4] = {zeros(), zeros(), zeros(), zeros()};
                for (int64_t i = 0; i < width; i++) {
                    lanes query = load(turned + i * padded + g * LANES);
#pragma GCC unroll 4
                    for (int e = 0; e < 4; e++) products[e] = fused(spread(key[e][i]), query, products[e]);
                }
                lanes own = load(share + g * LANES);
#pragma GCC unroll 4
                for (int e = 0; e < 4; e++) totals[e] = plus(totals[e], times(not_negative(products[e]), own));
            }
            sum_4(scores, totals);
            for (int64_t e = 0; e < count; e++) out[row * entries + entry + e] = scores[e];
        }
    }
    free(turned);
    return 1;
}
