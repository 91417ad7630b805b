/* Asks for values, receives them where they belong and says which are as they should be, without the interpreter and
 * its lock.
 *
 * Requests go out a few ahead of the replies. Only replies of the length that was foreseen are taken. The first that is
 * anything else (a null, an error, a push message, another length) is left in the bytes read ahead, for resp.py to
 * understand. Plain C without Python's headers: called through ctypes (native_reads.py), and nothing is lost but speed
 * where it could not be built.
 */
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>

enum { DONE = 0, TIMED_OUT = 1, RESET = 2, PROTOCOL = 3 };
enum { NOT_JUDGED = 0, APPROXIMATE = 1, EXACT = 2 };

/* Where one value goes: its first bytes apart from the rest. What its header should be (see `judge`), or null. Where its
 * request ends: it begins where the one before ends. And, written here: the hash of its payload, taken while the
 * processor's cache still has it, and the verdict. */
struct value {
    char *head;
    int64_t head_bytes;
    char *payload;
    int64_t payload_bytes;
    const char *plain;
    int64_t request_end;
    uint64_t payload_hash;
    int64_t verdict;
};

typedef uint64_t hash_function(const void *bytes, size_t length);

/* All requests, how many have been sent, and how many may be ahead of the replies. */
struct requests {
    const char *bytes;
    int64_t sent;
    int64_t ahead;
};

/* The connection's bytes read ahead: [start, end) of `bytes`. */
struct ahead {
    char *bytes;
    int64_t capacity;
    int64_t start;
    int64_t end;
};

struct source {
    int fd;
    int64_t deadline_ns;
    int64_t armed_ns;
    struct ahead *ahead;
};

/* Offsets of a header's fields, as in plain_block_headers.py. All integers are little-endian. */
enum { FLAGS_AT = 8, CHECKSUM_AT = 112, VALID_FROM_AT = 144, HEADER_CHECKSUM_AT = 252 };
enum { EXACT_FLAG = 1 };

static uint32_t crc_of_byte[256];

__attribute__((constructor)) static void fill_crc_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78 : 0);
        crc_of_byte[byte] = crc;
    }
}

static uint32_t crc32c(const char *bytes, int count) {
    uint32_t crc = ~0u;
    for (int at = 0; at < count; at++) crc = crc >> 8 ^ crc_of_byte[(crc ^ (unsigned char)bytes[at]) & 0xFF];
    return ~crc;
}

static uint64_t integer(const char *bytes, int count) {
    uint64_t value = 0;
    while (count--) value = value << 8 | (unsigned char)bytes[count];
    return value;
}

/* Whether a value is a plain block, whole and unchanged: its header is `plain` in every field but the flag for exact, the
 * checksums, writer, time and owner. Anything else, right or wrong, is not judged here. */
static int64_t judge(const struct value *value) {
    const char *head = value->head, *plain = value->plain;
    int same = memcmp(head, plain, FLAGS_AT) == 0 && (head[FLAGS_AT] & ~EXACT_FLAG) == plain[FLAGS_AT] &&
               memcmp(head + FLAGS_AT + 1, plain + FLAGS_AT + 1, CHECKSUM_AT - FLAGS_AT - 1) == 0 &&
               memcmp(head + VALID_FROM_AT, plain + VALID_FROM_AT, HEADER_CHECKSUM_AT - VALID_FROM_AT) == 0 &&
               integer(head + CHECKSUM_AT, 8) == value->payload_hash &&
               integer(head + HEADER_CHECKSUM_AT, 4) == crc32c(head, HEADER_CHECKSUM_AT);
    return !same ? NOT_JUDGED : head[FLAGS_AT] & EXACT_FLAG ? EXACT : APPROXIMATE;
}

#define ARMED_NS 5000000 /* a kernel timeout set less than this ago is not set again */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Let the kernel end the next call at the deadline, at most ARMED_NS later. */
static int arm(struct source *from) {
    int64_t now = now_ns(), left_us = (from->deadline_ns - now + 999) / 1000;
    if (left_us <= 0) return TIMED_OUT;
    if (from->armed_ns && now - from->armed_ns <= ARMED_NS) return DONE;
    struct timeval timeout = {.tv_sec = left_us / 1000000, .tv_usec = left_us % 1000000};
    if (setsockopt(from->fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout)) return RESET;
    from->armed_ns = now;
    return DONE;
}

static int receive(struct source *from, char *into, int64_t bytes, int flags, int64_t *received) {
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
static int read_ahead(struct source *from, int64_t bytes) {
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

/* Fill `into`: first with what was read ahead, then from the socket, straight into place. */
static int fill(struct source *from, char *into, int64_t bytes) {
    struct ahead *ahead = from->ahead;
    int64_t at = ahead->end - ahead->start < bytes ? ahead->end - ahead->start : bytes;
    memcpy(into, ahead->bytes + ahead->start, (size_t)at);
    ahead->start += at;
    while (at < bytes) {
        int64_t got;
        int fault = receive(from, into + at, bytes - at, MSG_WAITALL, &got);
        if (fault) return fault;
        at += got;
    }
    return DONE;
}

/* Whether the next reply begins with `line`. Reads no byte more than tells. */
static int begins_with(struct source *from, const char *line, int64_t bytes, int *same) {
    struct ahead *ahead = from->ahead;
    *same = 1;
    for (int64_t at = 0; at < bytes && *same; at++) {
        int fault = read_ahead(from, at + 1);
        if (fault) return fault;
        *same = ahead->bytes[ahead->start + at] == line[at];
    }
    return DONE;
}

/* Send what may be on its way once `done` requests have been answered. */
static int proceed(
    struct source *to, const struct value *values, int64_t count, struct requests *requests, int64_t done) {
    if (requests->sent == count || requests->sent - done > requests->ahead / 2) return DONE;
    int64_t until = done + requests->ahead < count ? done + requests->ahead : count;
    int64_t at = requests->sent ? values[requests->sent - 1].request_end : 0;
    while (at < values[until - 1].request_end) {
        ssize_t put = send(to->fd, requests->bytes + at, (size_t)(values[until - 1].request_end - at),
                           MSG_DONTWAIT | MSG_NOSIGNAL);
        if (put > 0) {
            at += put;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            struct pollfd writable = {.fd = to->fd, .events = POLLOUT};
            int64_t left_ms = (to->deadline_ns - now_ns()) / 1000000;
            if (left_ms <= 0 || poll(&writable, 1, (int)left_ms) == 0) return TIMED_OUT;
        } else if (errno != EINTR) {
            return RESET;
        }
    }
    requests->sent = until;
    return DONE;
}

/* Ask for `count` values and read them; `done` says how many are in place, whatever is returned. DONE with fewer: the
 * next reply is not as foreseen. After any other answer the connection is in doubt. */
int whalepod_read_and_judge(int fd, struct value *values, int64_t count, struct requests *requests, struct ahead *ahead,
                         hash_function *hash, int64_t timeout_ns, int64_t *done) {
    struct source from = {.fd = fd, .deadline_ns = now_ns() + timeout_ns, .armed_ns = 0, .ahead = ahead};
    for (*done = 0; *done < count; ++*done) {
        struct value *value = values + *done;
        char line[32];
        int same, fault;
        int bytes = snprintf(line, sizeof line, "$%lld\r\n", (long long)(value->head_bytes + value->payload_bytes));
        if ((fault = proceed(&from, values, count, requests, *done))) return fault;
        if ((fault = begins_with(&from, line, bytes, &same))) return fault;
        if (!same) return DONE;
        ahead->start += bytes;
        if ((fault = fill(&from, value->head, value->head_bytes))) return fault;
        if ((fault = fill(&from, value->payload, value->payload_bytes))) return fault;
        if ((fault = read_ahead(&from, 2))) return fault;
        if (memcmp(ahead->bytes + ahead->start, "\r\n", 2)) return PROTOCOL;
        ahead->start += 2;
        if (hash) value->payload_hash = hash(value->payload, (size_t)value->payload_bytes);
        value->verdict = hash && value->plain ? judge(value) : NOT_JUDGED;
    }
    return DONE;
}
