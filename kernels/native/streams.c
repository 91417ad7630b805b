/* Residual streams: their mixing coefficients, collapsing and expanding them, and what a gate lets in. */

#define STREAMS_MAX 16

/* Softmax over the last axis and `iterations` normalisations of eight matrices at once, one in each lane. */
static void sinkhorn(float (*m)[STREAMS_MAX][LANES], int64_t count, float eps, int64_t iterations) {
    lanes small = spread(eps);
    for (int64_t i = 0; i < count; i++) {
        lanes total = zeros();
        for (int lane = 0; lane < LANES; lane++) {
            float highest = m[i][0][lane];
            for (int64_t k = 1; k < count; k++) highest = larger(highest, m[i][k][lane]);
            for (int64_t k = 0; k < count; k++) m[i][k][lane] = exponential(m[i][k][lane] - highest);
        }
        for (int64_t k = 0; k < count; k++) total = plus(total, load(m[i][k]));
        for (int64_t k = 0; k < count; k++) store(m[i][k], plus(over(load(m[i][k]), total), small));
    }
    for (int64_t iteration = 0; iteration < iterations; iteration++) {
        for (int64_t i = 0; iteration && i < count; i++) {
            lanes total = small;
            for (int64_t k = 0; k < count; k++) total = plus(total, load(m[i][k]));
            for (int64_t k = 0; k < count; k++) store(m[i][k], over(load(m[i][k]), total));
        }
        for (int64_t k = 0; k < count; k++) {
            lanes total = small;
            for (int64_t i = 0; i < count; i++) total = plus(total, load(m[i][k]));
            for (int64_t i = 0; i < count; i++) store(m[i][k], over(load(m[i][k]), total));
        }
    }
}

/* values [rows, (2 + S) S] -> pre, post [rows, S], comb [rows, S, S]. */
void whalepod_split_mixes(const float *values, const float *scale, const float *base, float *pre, float *post, float *comb,
                          int64_t rows, int64_t count, float eps, int64_t iterations) {
    float m[STREAMS_MAX][STREAMS_MAX][LANES];
    int64_t all = (2 + count) * count;
    for (int64_t first = 0; first < rows; first += LANES) {
        int64_t some = rows - first < LANES ? rows - first : LANES;
        for (int64_t lane = 0; lane < LANES; lane++) {
            int64_t row = first + (lane < some ? lane : 0);
            const float *own = values + row * all;
            for (int64_t i = 0; i < count && lane < some; i++) {
                pre[row * count + i] = sigmoid(add_product(own[i], scale[i], base[i])) + eps;
                post[row * count + i] = sigmoid(add_product(own[count + i], scale[count + i], base[count + i])) * 2.0f;
            }
            for (int64_t i = 0; i < count; i++)
                for (int64_t k = 0, at = (2 + i) * count; k < count; k++, at++)
                    m[i][k][lane] = add_product(own[at], scale[at], base[at]);
        }
        sinkhorn(m, count, eps, iterations);
        for (int64_t lane = 0; lane < some; lane++)
            for (int64_t i = 0; i < count; i++)
                for (int64_t k = 0; k < count; k++)
                    comb[((first + lane) * count + i) * count + k] = m[i][k][lane];
    }
}

/* streams [rows, S · D], fn [(2 + S) S, S · D]; `values` [rows, (2 + S) S] is room to work in. */
void whalepod_predict_mixes(const float *streams, const float *fn, const float *scale, const float *base, float *values,
                            float *pre, float *post, float *comb, int64_t rows, int64_t count, int64_t width, float rms_eps,
                            float eps, int64_t iterations) {
    int64_t all = (2 + count) * count;
    products(streams, width, fn, values, all, rows, width, all);
    for (int64_t row = 0; row < rows; row++) {
        float inverse = inverse_rms(streams + row * width, width, rms_eps);
        for (int64_t i = 0; i < all; i++) values[row * all + i] *= inverse;
    }
    whalepod_split_mixes(values, scale, base, pre, post, comb, rows, count, eps, iterations);
}

/* streams [rows, S, D], weights [rows, S] -> [rows, D]. */
void whalepod_collapse(const float *streams, const float *weights, float *out, int64_t rows, int64_t count, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const float *own = streams + row * count * width, *share = weights + row * count;
        float *to = out + row * width;
        for (int64_t d = 0; d < width; d++) to[d] = own[d] * share[0];
        for (int64_t i = 1; i < count; i++)
            for (int64_t d = 0; d < width; d++) to[d] = add_product(own[i * width + d], share[i], to[d]);
    }
}

/* y [rows, D], streams [rows, S, D], post [rows, S], comb [rows, S, S] -> [rows, S, D]. */
void whalepod_expand(const float *y, const float *streams, const float *post, const float *comb, float *out, int64_t rows,
                     int64_t count, int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < count; k++) {
            const float *own = streams + row * count * width, *from = y + row * width;
            const float *carry = comb + row * count * count + k;
            float *to = out + (row * count + k) * width, share = post[row * count + k];
            for (int64_t d = 0; d < width; d++) to[d] = carry[0] * own[d];
            for (int64_t i = 1; i < count; i++)
                for (int64_t d = 0; d < width; d++) to[d] = add_product(carry[i * count], own[i * width + d], to[d]);
            for (int64_t d = 0; d < width; d++) to[d] = add_product(share, from[d], to[d]);
        }
}

/* streams [rows, S, D], projected [rows, (S + 1) D], weight [S, D], text [rows] or null -> [rows, S, D]; `weighted` [D] is
 * room to work in. */
void whalepod_let_in(const float *streams, const float *projected, const float *weight, const uint8_t *text, float *weighted,
                     float *out, int64_t rows, int64_t count, int64_t width, float eps, float magnitude_min) {
    float share = 1.0f / root((float)width);
    for (int64_t row = 0; row < rows; row++) {
        const float *value = projected + (row * (count + 1) + count) * width;
        for (int64_t i = 0; i < count; i++) {
            const float *query = streams + (row * count + i) * width, *key = projected + (row * (count + 1) + i) * width;
            for (int64_t d = 0; d < width; d++) weighted[d] = query[d] * weight[i * width + d];
            float norms = inverse_rms(query, width, eps) * inverse_rms(key, width, eps);
            float near = dot(weighted, key, width) * norms * share;
            float magnitude = root(larger(near < 0 ? -near : near, magnitude_min));
            float gate = text && !text[row] ? 0.0f : sigmoid(near < 0 ? -magnitude : magnitude);
            float *to = out + (row * count + i) * width;
            for (int64_t d = 0; d < width; d++) to[d] = add_product(gate, value[d], query[d]);
        }
    }
}
