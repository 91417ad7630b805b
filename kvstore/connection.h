/* What both C halves of the store's client share: a connection's bytes read ahead, and a header's checksum. No byte from
 * the server decides where anything is written. */
#ifndef WHALEPOD_CONNECTION_H
#define WHALEPOD_CONNECTION_H

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

/* What an exchange ends with. After any but DONE the connection is in doubt. */
enum { DONE = 0, TIMED_OUT = 1, RESET = 2, PROTOCOL = 3 };

/* Offsets of a header's fields, as in plain_block_headers.py. All integers are little-endian. */
enum { FLAGS_AT = 8, IDENTITY_AT = 32, IDENTITY_BYTES = 68, CHECKSUM_AT = 112, VALID_FROM_AT = 144 };
enum { HEADER_CHECKSUM_AT = 252, HEADER_BYTES = 256 };

/* The connection's bytes read ahead: [start, end) of `bytes`. */
struct ahead {
    char *bytes;
    int64_t capacity;
    int64_t start;
    int64_t end;
};

static uint32_t crc_of_byte[256];

__attribute__((constructor)) static void fill_crc_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78 : 0);
        crc_of_byte[byte] = crc;
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("sse4.2"))) static uint32_t crc32c_sse42(const char *bytes, int count) {
    uint64_t crc = ~0u, word;
    for (; count >= 8; count -= 8, bytes += 8) {
        memcpy(&word, bytes, sizeof word);
        crc = __builtin_ia32_crc32di(crc, word);
    }
    while (count--) crc = __builtin_ia32_crc32qi((uint32_t)crc, (unsigned char)*bytes++);
    return ~(uint32_t)crc;
}
#endif

static uint32_t crc32c(const char *bytes, int count) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("sse4.2")) return crc32c_sse42(bytes, count);
#endif
    uint32_t crc = ~0u;
    for (int at = 0; at < count; at++) crc = crc >> 8 ^ crc_of_byte[(crc ^ (unsigned char)bytes[at]) & 0xFF];
    return ~crc;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#endif
