/* Rows one by one: normalising, turning, pooling. */

/* x [rows, width], weight [width] -> [rows, width]. */
void whalepod_rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t width, float eps) {
    for (int64_t row = 0; row < rows; row++) {
        const float *own = x + row * width;
        float *to = out + row * width, inverse = inverse_rms(own, width, eps);
        for (int64_t i = 0; i < width; i++) to[i] = own[i] * inverse * weight[i];
    }
}

/* x [rows, vectors, width], factors [rows, width] -> the same shape as x. */
void whalepod_rotate(const float *x, const float *own, const float *neighbour, float *out, int64_t rows, int64_t vectors,
                     int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t v = 0; v < vectors; v++) {
            const float *from = x + (row * vectors + v) * width, *a = own + row * width, *b = neighbour + row * width;
            float *to = out + (row * vectors + v) * width;
            for (int64_t i = 0; i + 1 < width; i += 2) {
                to[i] = add_product(from[i + 1], b[i], from[i] * a[i]);
                to[i + 1] = add_product(from[i], b[i + 1], from[i + 1] * a[i + 1]);
            }
        }
}

/* values, scores [groups, ratio, width] -> [groups, width]. */
void whalepod_pool_groups(const float *values, const float *scores, float *out, int64_t groups, int64_t ratio,
                          int64_t width) {
    for (int64_t g = 0; g < groups; g++)
        for (int64_t c = 0; c < width; c++) {
            const float *value = values + g * ratio * width + c, *score = scores + g * ratio * width + c;
            float highest = score[0], total = 0, weighted = 0;
            for (int64_t t = 1; t < ratio; t++) highest = larger(highest, score[t * width]);
            for (int64_t t = 0; t < ratio; t++) {
                float share = exponential(score[t * width] - highest);
                total += share;
                weighted = add_product(share, value[t * width], weighted);
            }
            out[g * width + c] = weighted / total;
        }
}
