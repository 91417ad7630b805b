/* What both C halves of the store's client share: a connection's bytes read ahead, receiving by a deadline, and a
 * header's checksum. Nothing here blocks past its deadline, and no byte from the server decides where anything is written.
 */
#ifndef WHALEPOD_CONNECTION_H
#define WHALEPOD_CONNECTION_H

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
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

struct peer {
    int fd;
    int64_t deadline_ns;
    int64_t armed_ns;
    struct ahead *ahead;
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

#define ARMED_NS 5000000 /* a kernel timeout set less than this ago is not set again */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Let the kernel end the next call at the deadline, at most ARMED_NS later. */
static int arm(struct peer *from) {
    int64_t now = now_ns(), left_us = (from->deadline_ns - now + 999) / 1000;
    if (left_us <= 0) return TIMED_OUT;
    if (from->armed_ns && now - from->armed_ns <= ARMED_NS) return DONE;
    struct timeval timeout = {.tv_sec = left_us / 1000000, .tv_usec = left_us % 1000000};
    if (setsockopt(from->fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout)) return RESET;
    from->armed_ns = now;
    return DONE;
}

static int receive(struct peer *from, char *into, int64_t bytes, int flags, int64_t *received) {
    for (;;) {
        int fault = arm(from);
        if (fault) return fault;
        ssize_t got = recv(from->fd, into, (size_t)bytes, flags);
        if (got > 0) {
            *received = got;
            return DONE;
        }
        if (got == 0) return RESET;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return TIMED_OUT;
        if (errno != EINTR) return RESET;
    }
}

/* Have `bytes`, no more than the capacity, read ahead. */
static int read_ahead(struct peer *from, int64_t bytes) {
    struct ahead *ahead = from->ahead;
    while (ahead->end - ahead->start < bytes) {
        int64_t got;
        memmove(ahead->bytes, ahead->bytes + ahead->start, (size_t)(ahead->end - ahead->start));
        ahead->end -= ahead->start;
        ahead->start = 0;
        int fault = receive(from, ahead->bytes + ahead->end, ahead->capacity - ahead->end, 0, &got);
        if (fault) return fault;
        ahead->end += got;
    }
    return DONE;
}

/* Whether the next reply begins with `line`. Reads no byte more than tells. */
static int begins_with(struct peer *from, const char *line, int64_t bytes, int *same) {
    struct ahead *ahead = from->ahead;
    *same = 1;
    for (int64_t at = 0; at < bytes && *same; at++) {
        int fault = read_ahead(from, at + 1);
        if (fault) return fault;
        *same = ahead->bytes[ahead->start + at] == line[at];
    }
    return DONE;
}

/* After a send that did not take all: wait until more can be sent. */
static int wait_writable(struct peer *to) {
    if (errno == EINTR) return DONE;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return RESET;
    struct pollfd writable = {.fd = to->fd, .events = POLLOUT};
    int64_t left_ms = (to->deadline_ns - now_ns() + 999999) / 1000000;
    if (left_ms <= 0 || poll(&writable, 1, (int)left_ms) == 0) return TIMED_OUT;
    return DONE;
}

#endif
