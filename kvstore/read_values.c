/* Asks for values, receives them where they belong and says which are as they should be, without the interpreter and
 * its lock.
 *
 * Requests go out a few ahead of the replies. Only replies of the length that was foreseen are taken. The first that is
 * anything else (a null, an error, a push message, another length) is left in the bytes read ahead, for resp.py to
 * understand. Plain C without Python's headers: called through ctypes (native_reads.py), and nothing is lost but speed
 * where it could not be built.
 */
#include <stdio.h>

#include "connection.h"
#include "xxh3.h"

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

/* All requests, how many have been sent, how many may be ahead of the replies, and whether a reply that has begun counts
 * as one. */
struct requests {
    const char *bytes;
    int64_t sent;
    int64_t ahead;
    int64_t early;
};

enum { EXACT_FLAG = 1 };

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

/* Send what may be on its way once `done` requests have been answered, or their replies have begun. */
static int proceed(
    struct peer *to, const struct value *values, int64_t count, struct requests *requests, int64_t done) {
    if (requests->sent >= count || requests->sent - done > requests->ahead / 2) return DONE;
    int64_t until = done + requests->ahead < count ? done + requests->ahead : count;
    int64_t at = requests->sent ? values[requests->sent - 1].request_end : 0;
    while (at < values[until - 1].request_end) {
        ssize_t put = send(to->fd, requests->bytes + at, (size_t)(values[until - 1].request_end - at),
                           MSG_DONTWAIT | MSG_NOSIGNAL);
        if (put > 0) {
            at += put;
        } else {
            int fault = wait_writable(to);
            if (fault) return fault;
        }
    }
    requests->sent = until;
    return DONE;
}

/* Ask for `count` values and read them; `done` says how many are in place, whatever is returned. DONE with fewer: the
 * next reply is not as foreseen. After any other answer the connection is in doubt. */
int whalepod_ask_and_judge(int fd, struct value *values, int64_t count, struct requests *requests, struct ahead *ahead,
                           hash_function *hash, int64_t timeout_ns, int64_t *done) {
    struct peer from = {.fd = fd, .deadline_ns = now_ns() + timeout_ns, .armed_ns = 0, .ahead = ahead};
    for (*done = 0; *done < count; ++*done) {
        struct value *value = values + *done;
        char line[32];
        int same, fault;
        int bytes = snprintf(line, sizeof line, "$%lld\r\n", (long long)(value->head_bytes + value->payload_bytes));
        if ((fault = proceed(&from, values, count, requests, *done))) return fault;
        if ((fault = begins_with(&from, line, bytes, &same))) return fault;
        if (!same) return DONE;
        ahead->start += bytes;
        if (requests->early && (fault = proceed(&from, values, count, requests, *done + 1))) return fault;
        if ((fault = fill(&from, value->head, value->head_bytes))) return fault;
        if ((fault = fill(&from, value->payload, value->payload_bytes))) return fault;
        if ((fault = read_ahead(&from, 2))) return fault;
        if (memcmp(ahead->bytes + ahead->start, "\r\n", 2)) return PROTOCOL;
        ahead->start += 2;
        if (hash) value->payload_hash = hash_of(value->payload, value->payload_bytes, hash);
        value->verdict = hash && value->plain ? judge(value) : NOT_JUDGED;
    }
    return DONE;
}
