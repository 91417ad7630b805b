/* Asks for values, receives them where they belong and says which are as they should be, without the interpreter and
 * its lock.
 *
 * Requests go out a few ahead of the replies. Only replies of the length that was foreseen are taken. The first that is
 * anything else (a null, an error, a push message, another length) is left in the bytes read ahead, for resp.py to
 * understand. Plain C without Python's headers: called through ctypes (native_reads.py), and nothing is lost but speed
 * where it could not be built.
 */
#include <poll.h>
#include <stdio.h>
#include <sys/time.h>

#include "connection.h"
#include "xxh3.h"

enum { NOT_JUDGED = 0, APPROXIMATE = 1, EXACT = 2 };

/* `spin_ns`: how long to look again and again for something to receive before sleeping. */
struct peer {
    int fd;
    int64_t deadline_ns;
    int64_t armed_ns;
    int64_t spin_ns;
    struct ahead *ahead;
};

/* Values of one length, in columns: a row each. `done`, `sent`: how many have been taken and asked for; `ahead`: how many
 * may be asked for before the first of them is answered, `early`: besides one whose reply has begun; `spin_ns`: as in
 * `struct peer`.
 *
 *   requests        all of them, `request_bytes` each; the last goes on to `requests_bytes`
 *   heads           [count][head_bytes], written: a value's first bytes, apart from the rest
 *   payloads        where the rest of each goes, `payload_bytes`
 *   plain           [HEADER_BYTES] what every header should be (see `judge`); null: none is judged
 *   identities      [count][IDENTITY_BYTES] what it should be from IDENTITY_AT on
 *   payload_hashes  written, while the processor's cache still has the payload
 *   verdicts        written
 */
struct reading {
    int64_t count, done, sent, ahead, early, spin_ns;
    const char *requests;
    int64_t request_bytes, requests_bytes;
    char *heads;
    int64_t head_bytes;
    char *const *payloads;
    int64_t payload_bytes;
    const char *plain;
    const char *identities;
    int64_t exact_only;
    uint64_t *payload_hashes;
    unsigned char *verdicts;
};

enum { EXACT_FLAG = 1 };

static uint64_t integer(const char *bytes, int count) {
    uint64_t value = 0;
    while (count--) value = value << 8 | (unsigned char)bytes[count];
    return value;
}

static int agrees(const char *head, const char *expected, int from, int to) {
    return memcmp(head + from, expected, (size_t)(to - from)) == 0;
}

/* Whether the value in row `at` is a plain block, whole and unchanged: its header is `plain` in every field but identity,
 * the flag for exact, the checksums, writer, time and owner. Anything else, right or wrong, is not judged here. */
static unsigned char judge(const struct reading *reading, int64_t at) {
    const char *head = reading->heads + at * reading->head_bytes, *plain = reading->plain;
    int exact = head[FLAGS_AT] & EXACT_FLAG;
    int right = agrees(head, plain, 0, FLAGS_AT) && (head[FLAGS_AT] & ~EXACT_FLAG) == plain[FLAGS_AT] &&
                agrees(head, plain + FLAGS_AT + 1, FLAGS_AT + 1, IDENTITY_AT) &&
                agrees(head, reading->identities + at * IDENTITY_BYTES, IDENTITY_AT, IDENTITY_AT + IDENTITY_BYTES) &&
                agrees(head, plain + IDENTITY_AT + IDENTITY_BYTES, IDENTITY_AT + IDENTITY_BYTES, CHECKSUM_AT) &&
                agrees(head, plain + VALID_FROM_AT, VALID_FROM_AT, HEADER_CHECKSUM_AT) &&
                integer(head + CHECKSUM_AT, 8) == reading->payload_hashes[at] &&
                integer(head + HEADER_CHECKSUM_AT, 4) == crc32c(head, HEADER_CHECKSUM_AT);
    return !right || (reading->exact_only && !exact) ? NOT_JUDGED : exact ? EXACT : APPROXIMATE;
}

#define ARMED_NS 5000000 /* a kernel timeout set less than this ago is not set again */

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
    int64_t spin_until_ns = now_ns() + from->spin_ns;
    if (spin_until_ns > from->deadline_ns) spin_until_ns = 0;
    for (;;) {
        int spins = from->spin_ns && now_ns() < spin_until_ns, fault = spins ? DONE : arm(from);
        if (fault) return fault;
        ssize_t got = recv(from->fd, into, (size_t)bytes, spins ? MSG_DONTWAIT : flags);
        if (got > 0) {
            *received = got;
            return DONE;
        }
        if (got == 0) return RESET;
        if (spins && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (now_ns() >= spin_until_ns) from->spin_ns /= 2;  /* in vain: somebody else has the server's core */
            continue;
        }
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK ? TIMED_OUT : RESET;
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

/* Fill `into`: first with what was read ahead, then from the socket, straight into place. */
static int fill(struct peer *from, char *into, int64_t bytes) {
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

static int64_t requests_end(const struct reading *reading, int64_t count) {
    return count == reading->count ? reading->requests_bytes : count * reading->request_bytes;
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

/* Send what may be on its way once `done` requests have been answered, or their replies have begun. */
static int proceed(struct peer *to, struct reading *reading, int64_t done) {
    if (reading->sent >= reading->count || reading->sent - done > reading->ahead / 2) return DONE;
    int64_t until = done + reading->ahead < reading->count ? done + reading->ahead : reading->count;
    int64_t at = reading->sent * reading->request_bytes, end = requests_end(reading, until);
    while (at < end) {
        ssize_t put = send(to->fd, reading->requests + at, (size_t)(end - at), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (put > 0) {
            at += put;
        } else {
            int fault = wait_writable(to);
            if (fault) return fault;
        }
    }
    reading->sent = until;
    return DONE;
}

/* Ask for what is left of `reading` and take it; its `done` says how far that came, whatever is returned. DONE before the
 * last: the next reply is not as foreseen; whoever takes it counts it in `done` and calls again. After any other answer
 * the connection is in doubt. */
int whalepod_read_batch(int fd, struct reading *reading, struct ahead *ahead, hash_function *hash, int64_t timeout_ns) {
    struct peer from = {.fd = fd, .deadline_ns = now_ns() + timeout_ns, .spin_ns = reading->spin_ns, .ahead = ahead};
    char line[32];
    int bytes = snprintf(line, sizeof line, "$%lld\r\n", (long long)(reading->head_bytes + reading->payload_bytes));
    for (; reading->done < reading->count; ++reading->done) {
        int64_t at = reading->done;
        char *payload = reading->payloads[at];
        int same, fault;
        if ((fault = proceed(&from, reading, at))) return fault;
        if ((fault = begins_with(&from, line, bytes, &same))) return fault;
        if (!same) return DONE;
        ahead->start += bytes;
        if (reading->early && (fault = proceed(&from, reading, at + 1))) return fault;
        if ((fault = fill(&from, reading->heads + at * reading->head_bytes, reading->head_bytes))) return fault;
        if ((fault = fill(&from, payload, reading->payload_bytes))) return fault;
        if ((fault = read_ahead(&from, 2))) return fault;
        if (memcmp(ahead->bytes + ahead->start, "\r\n", 2)) return PROTOCOL;
        ahead->start += 2;
        reading->payload_hashes[at] = hash_of(payload, reading->payload_bytes, hash);
        reading->verdicts[at] = reading->plain ? judge(reading, at) : NOT_JUDGED;
    }
    return DONE;
}
