/* xxh3-64 of long input (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), for processors with AVX2: the
 * xxhash package's own is built for any processor and takes twice as long. Whoever includes this falls back to that one.
 */
#ifndef WHALEPOD_XXH3_H
#define WHALEPOD_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint64_t hash_function(const void *bytes, size_t length);

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

enum { LONG_BYTES_MIN = 241, STRIPE_BYTES = 64, STRIPES_A_BLOCK = 16, BLOCK_BYTES = STRIPE_BYTES * STRIPES_A_BLOCK };
enum { LAST_STRIPE_SECRET_AT = 121, SCRAMBLE_SECRET_AT = 128, MERGE_SECRET_AT = 11, AHEAD_BYTES = 4096 };

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u

/* The specification's default secret, 192 bytes, as little-endian words. */
static const uint64_t secret_words[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

/* Lanes 0 to 3 and 4 to 7. */
struct lanes {
    __m256i low, high;
};

__attribute__((target("avx2"))) static inline __m256i load(const void *from) {
    return _mm256_loadu_si256((const __m256i *)from);
}

__attribute__((target("avx2"))) static inline __m256i mixed(__m256i lanes, const char *data, const char *secret) {
    __m256i input = load(data), keyed = _mm256_xor_si256(input, load(secret));
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i neighbour = _mm256_shuffle_epi32(input, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(product, _mm256_add_epi64(lanes, neighbour));
}

__attribute__((target("avx2"))) static inline void take_stripe(
    struct lanes *lanes, const char *stripe, const char *secret) {
    lanes->low = mixed(lanes->low, stripe, secret);
    lanes->high = mixed(lanes->high, stripe + 32, secret + 32);
}

__attribute__((target("avx2"))) static inline __m256i scrambled(__m256i lanes, const char *secret) {
    const __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    lanes = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), load(secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

static inline uint64_t folded_product(uint64_t left, uint64_t right) {
    unsigned __int128 product = (unsigned __int128)left * right;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t merged(const uint64_t lanes[8], const char *secret, uint64_t length) {
    uint64_t sum = length * PRIME64_1, keys[8];
    memcpy(keys, secret, sizeof keys);
    for (int at = 0; at < 8; at += 2) sum += folded_product(lanes[at] ^ keys[at], lanes[at + 1] ^ keys[at + 1]);
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9u;
    return sum ^ sum >> 32;
}

/* `length` is LONG_BYTES_MIN or more. */
__attribute__((target("avx2"))) static uint64_t hash_long(const char *bytes, size_t length) {
    const char *secret = (const char *)secret_words, *last = bytes + length - STRIPE_BYTES;
    struct lanes lanes = {
        _mm256_setr_epi64x(PRIME32_3, (int64_t)PRIME64_1, (int64_t)PRIME64_2, (int64_t)PRIME64_3),
        _mm256_setr_epi64x((int64_t)PRIME64_4, PRIME32_2, (int64_t)PRIME64_5, PRIME32_1),
    };
    size_t blocks = (length - 1) / BLOCK_BYTES, left = (length - 1 - blocks * BLOCK_BYTES) / STRIPE_BYTES;
    for (; blocks; blocks--, bytes += BLOCK_BYTES) {
        for (int stripe = 0; stripe < STRIPES_A_BLOCK; stripe++) {
            _mm_prefetch(bytes + stripe * STRIPE_BYTES + AHEAD_BYTES, _MM_HINT_T0);
            take_stripe(&lanes, bytes + stripe * STRIPE_BYTES, secret + 8 * stripe);
        }
        lanes.low = scrambled(lanes.low, secret + SCRAMBLE_SECRET_AT);
        lanes.high = scrambled(lanes.high, secret + SCRAMBLE_SECRET_AT + 32);
    }
    for (size_t stripe = 0; stripe < left; stripe++)
        take_stripe(&lanes, bytes + stripe * STRIPE_BYTES, secret + 8 * stripe);
    take_stripe(&lanes, last, secret + LAST_STRIPE_SECRET_AT);
    uint64_t words[8];
    _mm256_storeu_si256((__m256i *)words, lanes.low);
    _mm256_storeu_si256((__m256i *)(words + 4), lanes.high);
    return merged(words, secret + MERGE_SECRET_AT, length);
}

static uint64_t hash_of(const void *bytes, int64_t length, hash_function *any) {
    if (length < LONG_BYTES_MIN || !__builtin_cpu_supports("avx2")) return any(bytes, (size_t)length);
    return hash_long(bytes, (size_t)length);
}

#else

static uint64_t hash_of(const void *bytes, int64_t length, hash_function *any) { return any(bytes, (size_t)length); }

#endif

#endif
