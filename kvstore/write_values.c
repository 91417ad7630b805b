/* Stores values: stamps their headers, sends them and reads the answers, without the interpreter and its lock.
 *
 * Values go out a few ahead of the answers. Only the two answers that a SET is expected to get are taken. The first that
 * is anything else (an error, a push message) is left in the bytes read ahead, for resp.py to understand. Called through
 * ctypes (native_writes.py), as read_values.c is.
 */
#include "connection.h"
#include "xxh3.h"

enum { UNANSWERED = 0, STORED = 1, PRESENT = 2 };

/* Values of one length, in columns: a row each. `stamped`, `sent`, `answered`: how many have been; `ahead`: how many may be
 * sent before the first of them is answered.
 *
 *   words        what stands before, between and after the values, `first_bytes` of it before the first
 *   words_end    where the words end that follow a value: they begin where those before end
 *   heads        [count][HEADER_BYTES]; their two checksums are still to be written if `stamp`
 *   payloads     where the rest of each is, `payload_bytes`
 *   answers      written
 */
struct writing {
    int64_t count, stamped, sent, answered, ahead;
    const char *words;
    int64_t first_bytes;
    const int64_t *words_end;
    char *heads;
    char *const *payloads;
    int64_t payload_bytes;
    int64_t stamp;
    unsigned char *answers;
};

static void put_integer(char *into, uint64_t value, int count) {
    for (int at = 0; at < count; at++, value >>= 8) into[at] = (char)(value & 0xFF);
}

static void stamp_until(struct writing *writing, int64_t until, hash_function *hash) {
    for (; writing->stamp && writing->stamped < until; writing->stamped++) {
        char *head = writing->heads + writing->stamped * HEADER_BYTES;
        uint64_t checksum = hash_of(writing->payloads[writing->stamped], writing->payload_bytes, hash);
        put_integer(head + CHECKSUM_AT, checksum, 8);
        put_integer(head + HEADER_CHECKSUM_AT, crc32c(head, HEADER_CHECKSUM_AT), 4);
    }
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
static int send_next(struct peer *to, struct writing *writing) {
    int64_t at = writing->sent, words_at = at ? writing->words_end[at - 1] : writing->first_bytes;
    struct iovec pieces[3] = {
        {writing->heads + at * HEADER_BYTES, HEADER_BYTES},
        {writing->payloads[at], (size_t)writing->payload_bytes},
        {(char *)writing->words + words_at, (size_t)(writing->words_end[at] - words_at)},
    };
    int fault = send_pieces(to, pieces, 3);
    if (!fault) writing->sent++;
    return fault;
}

static int send_ahead(struct peer *to, struct writing *writing, hash_function *hash) {
    while (writing->sent < writing->count && writing->sent < writing->answered + writing->ahead) {
        stamp_until(writing, writing->sent + 1, hash);
        int fault = send_next(to, writing);
        if (fault) return fault;
    }
    if (writing->sent < writing->count) stamp_until(writing, writing->sent + 1, hash);  /* while the server is busy */
    return DONE;
}

static int read_answer(struct peer *from, unsigned char *answer) {
    static const struct {
        const char *line;
        int64_t bytes;
        unsigned char answer;
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

/* Store what is left of `writing`, which says how far that came, whatever is returned. DONE before the last: the next
 * answer is another one; whoever takes it counts it in `answered` and calls again. After any other result the connection
 * is in doubt. */
int whalepod_write_columns(int fd, struct writing *writing, struct ahead *ahead, hash_function *hash, int64_t timeout_ns) {
    struct peer peer = {.fd = fd, .deadline_ns = now_ns() + timeout_ns, .armed_ns = 0, .ahead = ahead};
    if (!writing->sent) {
        struct iovec first = {(char *)writing->words, (size_t)writing->first_bytes};
        int fault = send_pieces(&peer, &first, 1);
        if (fault) return fault;
    }
    for (;;) {
        int fault = send_ahead(&peer, writing, hash);
        if (fault) return fault;
        if (writing->answered == writing->count) return DONE;
        unsigned char *answer = writing->answers + writing->answered;
        fault = read_answer(&peer, answer);
        if (fault) return fault;
        if (*answer == UNANSWERED) return DONE;
        writing->answered++;
    }
}
