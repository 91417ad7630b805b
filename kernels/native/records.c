/* Packed records: codes, then scales (kernels/quantise/reference.py says what they mean). */

#define E4M3_MAX 448.0f
#define E2M1_MAX 6.0f

/* The nearest E4M3, ties to even, of a magnitude within its range; what is no number stays none. */
INLINE uint8_t e4m3_code(float x) {
    uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFF;
    uint32_t normal = (magnitude + 0x7FFFF + (magnitude >> 20 & 1)) - (120u << 23);
    uint32_t small = bits_of(from_bits(magnitude) * 512.0f + ROUNDER); /* below 2^-6: multiples of 2^-9 */
    uint32_t code = magnitude < 121u << 23 ? small & 0xF : normal >> 20;
    code = magnitude > 0x7F800000 ? 0x7F : code;
    return (uint8_t)(code | (bits >> 24 & 0x80));
}

INLINE float e4m3_value(uint8_t code) {
    uint32_t exponent = code >> 3 & 15, mantissa = code & 7, sign = (uint32_t)(code & 0x80) << 24;
    if ((code & 0x7F) == 0x7F) return from_bits(0x7FC00000 | sign);
    float magnitude = exponent ? from_bits((exponent + 120) << 23 | mantissa << 20) : (float)mantissa / 512.0f;
    return from_bits(bits_of(magnitude) | sign);
}

INLINE float power_value(uint8_t code) {
    return code == 255 ? from_bits(0x7FC00000) : from_bits(code ? (uint32_t)code << 23 : 0x400000);
}

/* The nearest E2M1: how many borders a magnitude has passed; a border belongs to the even one of its two codes. */
INLINE uint8_t e2m1_code(float x) {
    float a = x < 0 ? -x : x;
    uint32_t code = (uint32_t)(a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return (uint8_t)(code | (bits_of(x) >> 28 & 8));
}

static const float E2M1_VALUES[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

struct format {
    int64_t four_bits; /* codes are E2M1, else E4M3 */
    int64_t power;     /* scales are powers of two, else E4M3 */
    int64_t group;
    float amax_min;
};

INLINE float scale_value(const struct format *f, uint8_t code) { return f->power ? power_value(code) : e4m3_value(code); }

/* The scale of the `group` channels of x. */
INLINE uint8_t scale_code(const struct format *f, const float *x) {
    uint32_t highest = 0; /* magnitudes are ordered as their bits */
    for (int64_t i = 0; i < f->group; i++) {
        uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFF;
        highest = magnitude > highest ? magnitude : highest;
    }
    if (highest > 0x7F800000) return f->power ? 0xFF : 0x7F; /* no number among them: the whole group is none */
    float target = larger(from_bits(highest), f->amax_min) / (f->four_bits ? E2M1_MAX : E4M3_MAX);
    return f->power ? (uint8_t)((bits_of(target) + 0x7FFFFF) >> 23) : e4m3_code(smaller(target, E4M3_MAX));
}

INLINE float scaled(float x, float scale, float limit) {
    float value = x / scale;
    value = value > limit ? limit : value;
    return value < -limit ? -limit : value;
}

static void encode(const struct format *f, const float *x, uint8_t *record, int64_t width) {
    uint8_t *scales = record + (f->four_bits ? width / 2 : width);
    for (int64_t g = 0; g < width / f->group; g++) {
        const float *own = x + g * f->group;
        uint8_t code = scale_code(f, own), *codes = record + (f->four_bits ? g * f->group / 2 : g * f->group);
        float scale = scale_value(f, code);
        scales[g] = code;
        if (f->four_bits)
            for (int64_t i = 0; i < f->group; i += 2)
                codes[i / 2] = (uint8_t)(e2m1_code(scaled(own[i], scale, E2M1_MAX)) |
                                         e2m1_code(scaled(own[i + 1], scale, E2M1_MAX)) << 4);
        else
            for (int64_t i = 0; i < f->group; i++) codes[i] = e4m3_code(scaled(own[i], scale, E4M3_MAX));
    }
}

static void decode(const struct format *f, const uint8_t *record, float *x, int64_t width) {
    const uint8_t *scales = record + (f->four_bits ? width / 2 : width);
    for (int64_t g = 0; g < width / f->group; g++) {
        float scale = scale_value(f, scales[g]), *to = x + g * f->group;
        const uint8_t *codes = record + (f->four_bits ? g * f->group / 2 : g * f->group);
        if (f->four_bits)
            for (int64_t i = 0; i < f->group; i++) to[i] = E2M1_VALUES[codes[i / 2] >> (i & 1 ? 4 : 0) & 15] * scale;
        else
            for (int64_t i = 0; i < f->group; i++) to[i] = e4m3_value(codes[i]) * scale;
    }
}

/* x [rows, width] -> records [rows, bytes]. */
void whalepod_encode(const float *x, uint8_t *records, int64_t rows, int64_t width, int64_t bytes, int64_t four_bits,
                     int64_t power, int64_t group, float amax_min) {
    struct format f = {four_bits, power, group, amax_min};
    for (int64_t row = 0; row < rows; row++) encode(&f, x + row * width, records + row * bytes, width);
}

/* records [rows, bytes] -> x [rows, width]. */
void whalepod_decode(const uint8_t *records, float *x, int64_t rows, int64_t width, int64_t bytes, int64_t four_bits,
                     int64_t power, int64_t group) {
    struct format f = {four_bits, power, group, 0};
    for (int64_t row = 0; row < rows; row++) decode(&f, records + row * bytes, x + row * width, width);
}

/* What records of x would hold, [rows, width], out of place. */
static void round_trip(const struct format *f, const float *x, float *out, int64_t rows, int64_t width) {
    int64_t group = f->group;
    for (int64_t at = 0; at < rows * width; at += group) {
        float scale = scale_value(f, scale_code(f, x + at));
        if (f->four_bits)
            for (int64_t i = 0; i < group; i++)
                out[at + i] = E2M1_VALUES[e2m1_code(scaled(x[at + i], scale, E2M1_MAX))] * scale;
        else
            for (int64_t i = 0; i < group; i++)
                out[at + i] = e4m3_value(e4m3_code(scaled(x[at + i], scale, E4M3_MAX))) * scale;
    }
}

void whalepod_round_trip(const float *x, float *out, int64_t rows, int64_t width, int64_t four_bits, int64_t power,
                         int64_t group, float amax_min) {
    struct format f = {four_bits, power, group, amax_min};
    round_trip(&f, x, out, rows, width);
}
