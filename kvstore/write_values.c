/* Stores values: stamps their headers, sends them and reads the answers, without the interpreter and its lock.
 *
 * Values go out a few ahead of the answers. Only the two answers that a SET is expected to get are taken. The first that
 * is anything else (an error, a push message) is left in the bytes read ahead, for resp.py to understand. Called through
 * ctypes (native_writes.py), as read_values.c is.
 */
#include "connection.h"
#include "xxh3.h"

enum { UNANSWERED = 0, STORED = 1, PRESENT = 2 };

/* One value: a header of HEADER_BYTES or more, whose two checksums are still to be written if `stamp`, and its payload.
 * Where the words end that follow it: they begin where those before end. And, written here: its answer. */
struct value {
    char *head;
    int64_t head_bytes;
    const char *payload;
    int64_t payload_bytes;
    int64_t words_end;
    int64_t stamp;
    int64_t answer;
};

/* What stands before, between and after the values, `first_bytes` of it before the first; how many values have been
 * stamped, sent and answered, and how many may be sent ahead of the answers. */
struct progress {
    const char *words;
    int64_t first_bytes;
    int64_t ahead;
    int64_t stamped;
    int64_t sent;
    int64_t answered;
};

static void put_integer(char *into, uint64_t value, int count) {
    for (int at = 0; at < count; at++, value >>= 8) into[at] = (char)(value & 0xFF);
}

static void stamp(struct value *value, hash_function *hash) {
    if (!value->stamp) return;
    put_integer(value->head + CHECKSUM_AT, hash_of(value->payload, value->payload_bytes, hash), 8);
    put_integer(value->head + HEADER_CHECKSUM_AT, crc32c(value->head, HEADER_CHECKSUM_AT), 4);
}

/* Send all of `pieces`, which are used up. */
static int send_pieces(struct peer *to, struct iovec *pieces, int count) {
    while (count) {
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
        ssize_t put = sendmsg(to->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (put < 0) {
            int fault = wait_writable(to);
            if (fault) return fault;
            continue;
        }
        while (count && (size_t)put >= pieces->iov_len) {
            put -= (ssize_t)pieces->iov_len;
            pieces++, count--;
        }
        if (put) {
            pieces->iov_base = (char *)pieces->iov_base + put;
            pieces->iov_len -= (size_t)put;
        }
    }
    return DONE;
}

/* Send the next value with the words after it, up to where the one behind it begins: a server that knows what comes
 * receives it in place, one that finds all of it in its buffer moves it once more. */
static int send_next(struct peer *to, struct value *values, struct progress *progress) {
    const struct value *value = values + progress->sent;
    int64_t words_at = progress->sent ? value[-1].words_end : progress->first_bytes;
    struct iovec pieces[3] = {
        {value->head, (size_t)value->head_bytes},
        {(char *)value->payload, (size_t)value->payload_bytes},
        {(char *)progress->words + words_at, (size_t)(value->words_end - words_at)},
    };
    int fault = send_pieces(to, pieces, 3);
    if (!fault) progress->sent++;
    return fault;
}

static void stamp_until(struct value *values, struct progress *progress, int64_t until, hash_function *hash) {
    while (progress->stamped < until) stamp(values + progress->stamped++, hash);
}

static int send_ahead(
    struct peer *to, struct value *values, int64_t count, struct progress *progress, hash_function *hash) {
    if (!progress->sent && !progress->stamped) {
        struct iovec first = {(char *)progress->words, (size_t)progress->first_bytes};
        int fault = send_pieces(to, &first, 1);
        if (fault) return fault;
    }
    while (progress->sent < count && progress->sent < progress->answered + progress->ahead) {
        stamp_until(values, progress, progress->sent + 1, hash);
        int fault = send_next(to, values, progress);
        if (fault) return fault;
    }
    if (progress->sent < count) stamp_until(values, progress, progress->sent + 1, hash);  /* while the server is busy */
    return DONE;
}

static int read_answer(struct peer *from, int64_t *answer) {
    static const struct {
        const char *line;
        int64_t bytes, answer;
    } expected[] = {{"+OK\r\n", 5, STORED}, {"$-1\r\n", 5, PRESENT}, {"_\r\n", 3, PRESENT}};
    for (int which = 0; which < 3; which++) {
        int same, fault = begins_with(from, expected[which].line, expected[which].bytes, &same);
        if (fault) return fault;
        if (same) {
            from->ahead->start += expected[which].bytes;
            *answer = expected[which].answer;
            return DONE;
        }
    }
    return DONE;
}

/* Store `count` values; `progress` says how far it has come, whatever is returned. With `all_sent` it ends when all have
 * been sent, else when all have been answered. DONE before that: the next answer is another one; whoever takes it counts
 * it in `progress` and calls again. After any other result the connection is in doubt. */
int whalepod_stamp_and_write(int fd, struct value *values, int64_t count, int all_sent, struct progress *progress,
                             struct ahead *ahead, hash_function *hash, int64_t timeout_ns) {
    struct peer peer = {.fd = fd, .deadline_ns = now_ns() + timeout_ns, .armed_ns = 0, .ahead = ahead};
    for (;;) {
        int fault = send_ahead(&peer, values, count, progress, hash);
        if (fault) return fault;
        if (progress->answered == count || (all_sent && progress->sent == count)) return DONE;
        struct value *value = values + progress->answered;
        fault = read_answer(&peer, &value->answer);
        if (fault) return fault;
        if (value->answer == UNANSWERED) return DONE;
        progress->answered++;
    }
}
