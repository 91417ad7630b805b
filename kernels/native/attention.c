/* Attention of rows over their own keys, which are also the values, with a sink. */

/* Two heads' products with four keys. */
INLINE void head_pair(const float *one, const float *other, const float *const *keys, float *out, int64_t out_step,
                      int64_t width) {
    lanes totals[2][4];
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++) totals[i][j] = zeros();
    int64_t at = 0;
    for (; at + LANES <= width; at += LANES) {
        lanes a = load(one + at), b = load(other + at);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            lanes key = load(keys[j] + at);
            totals[0][j] = fused(a, key, totals[0][j]);
            totals[1][j] = fused(b, key, totals[1][j]);
        }
    }
    if (at < width)
        for (int j = 0; j < 4; j++) {
            lanes key = load_some(keys[j] + at, width - at);
            totals[0][j] = fused(load_some(one + at, width - at), key, totals[0][j]);
            totals[1][j] = fused(load_some(other + at, width - at), key, totals[1][j]);
        }
    sum_4(out, totals[0]);
    sum_4(out + out_step, totals[1]);
}

/* Scores to weights, in place; what the weighted keys are divided by. */
INLINE float softmax(float *scores, int64_t count, float scale, float sink) {
    float highest = sink;
    for (int64_t j = 0; j < count; j++) {
        scores[j] *= scale;
        highest = larger(highest, scores[j]);
    }
    for (int64_t j = 0; j < count; j++) scores[j] = exponential(scores[j] - highest);
    lanes total = zeros();
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) total = plus(total, load(scores + j));
    if (j < count) total = plus(total, load_some(scores + j, count - j));
    return sum(total) + exponential(sink - highest);
}

/* Weighted keys, `chunks` (a constant where it is called) vectors of eight channels from channel `at` on. */
INLINE void weighted(const int chunks, const float *weights, const float *const *keys, int64_t count, float divisor,
                     float *out, int64_t at) {
    lanes totals[8];
    for (int c = 0; c < chunks; c++) totals[c] = zeros();
    for (int64_t j = 0; j < count; j++) {
        lanes share = spread(weights[j]);
#pragma GCC unroll 8
        for (int c = 0; c < chunks; c++) totals[c] = fused(share, load(keys[j] + at + c * LANES), totals[c]);
    }
    for (int c = 0; c < chunks; c++) store(out + at + c * LANES, over(totals[c], spread(divisor)));
}

static void weighted_keys(const float *weights, const float *const *keys, int64_t count, float divisor, float *out,
                          int64_t width) {
    int64_t at = 0;
    for (; at + 8 * LANES <= width; at += 8 * LANES) weighted(8, weights, keys, count, divisor, out, at);
    for (; at + LANES <= width; at += LANES) weighted(1, weights, keys, count, divisor, out, at);
    for (; at < width; at++) {
        float total = 0;
        for (int64_t j = 0; j < count; j++) total = __builtin_fmaf(weights[j], keys[j][at], total);
        out[at] = total / divisor;
    }
}

/* queries [heads, width], `keys` of `count` valid ones -> out [heads, width]; scores has room for two heads. */
static void attend(const float *queries, const float **keys, int64_t count, const float *sink, float scale, float *scores,
                   int64_t scores_step, float *out, int64_t heads, int64_t width) {
    for (int64_t j = count; j % 4; j++) keys[j] = queries;
    for (int64_t h = 0; h < heads; h += 2) {
        int64_t other = h + 1 < heads ? h + 1 : h;
        for (int64_t j = 0; j < count; j += 4)
            head_pair(queries + h * width, queries + other * width, keys + j, scores + j, scores_step, width);
        for (int64_t i = h; i <= other; i++) {
            float *own = scores + (i - h) * scores_step;
            float divisor = softmax(own, count, scale, sink[i]);
            weighted_keys(own, keys, count, divisor, out + i * width, width);
        }
    }
}

/* queries [rows, heads, width], keys [rows, count, width], valid [rows, count], sink [heads] -> [rows, heads, width].
 * Keys that are not valid are left out, so that they change no bit. 0: no memory. */
int whalepod_attention(const float *queries, const float *keys, const uint8_t *valid, const float *sink, float *out,
                       int64_t rows, int64_t heads, int64_t count, int64_t width, float scale) {
    int64_t room = count + 4;
    const float **own = malloc((size_t)room * sizeof *own);
    float *scores = malloc((size_t)(2 * room) * sizeof *scores);
    for (int64_t row = 0; own && scores && row < rows; row++) {
        int64_t some = 0;
        for (int64_t j = 0; j < count; j++)
            if (valid[row * count + j]) own[some++] = keys + (row * count + j) * width;
        attend(queries + row * heads * width, own, some, sink, scale, scores, room, out + row * heads * width, heads, width);
    }
    int done = own && scores;
    free(own);
    free(scores);
    return done;
}
