/* Stores values: stamps their headers, sends them over a few connections at once and reads the answers, without the
 * interpreter and its lock.
 *
 * Values go out a few ahead of the answers. Only the two answers that a SET is expected to get are taken. The first that
 * is anything else (an error, a push message) is left in the bytes read ahead, for resp.py to understand. Called through
 * ctypes (native_writes.py), as read_values.c is.
 *
 * A connection's next command begins right behind the value before it, and its value follows when that one has been
 * answered: a server that knows what comes receives it in place; one that finds both in its buffer moves the value once
 * more, which is a quarter of its work.
 */
#include <poll.h>
#include <sys/uio.h>

#include "connection.h"
#include "xxh3.h"

enum { UNANSWERED = 0, STORED = 1, PRESENT = 2 };

/* One connection. Of `lanes` of them number n has values n, n + lanes, n + 2 lanes and so on. `sent`, `answered`: how many
 * of those have been; `put`: bytes of the next that are on their way, counted from its header on, so below 0 before the
 * start of the first command has been sent. `result`: DONE before its last answer: the next is another one; whoever takes
 * it counts it in `answered` and calls again. After any other result the connection is in doubt. */
struct lane {
    int64_t fd, sent, answered, put, result;
    struct ahead ahead;
};

/* Values of one length, in columns: a row each. `stamped`: how many have been; `ahead`: how many a connection may send
 * before the first of them is answered.
 *
 *   words        what stands before, between and after the values: a start for each connection, then what follows a value
 *   words_end    where each of these ends, `lanes` + `count`
 *   heads        [count][HEADER_BYTES]; their two checksums are still to be written if `stamp`
 *   payloads     where the rest of each is, `payload_bytes`
 *   answers      written
 */
struct writing {
    int64_t count, lanes, stamped, ahead;
    const char *words;
    const int64_t *words_end;
    char *heads;
    char *const *payloads;
    int64_t payload_bytes;
    int64_t stamp;
    unsigned char *answers;
};

enum { LANES_MAX = 16 };
enum { GOES_ON = -1, NOTHING = 0, SOMETHING = 1 };

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

static struct iovec words_of(const struct writing *writing, int64_t number) {
    int64_t at = number ? writing->words_end[number - 1] : 0;
    return (struct iovec){(char *)writing->words + at, (size_t)(writing->words_end[number] - at)};
}

/* What is to be sent for row `row`: its value and the words behind it, but for the first `put` bytes. */
static int pieces_of(const struct writing *writing, int64_t row, int64_t put, struct iovec *pieces) {
    struct iovec all[3] = {
        {writing->heads + row * HEADER_BYTES, HEADER_BYTES},
        {writing->payloads[row], (size_t)writing->payload_bytes},
        words_of(writing, writing->lanes + row),
    };
    int count = 0;
    for (int at = 0; at < 3; at++) {
        int64_t skipped = put < (int64_t)all[at].iov_len ? put : (int64_t)all[at].iov_len;
        put -= skipped;
        if (skipped == (int64_t)all[at].iov_len) continue;
        pieces[count++] = (struct iovec){(char *)all[at].iov_base + skipped, all[at].iov_len - (size_t)skipped};
    }
    return count;
}

static int64_t next_row(const struct writing *writing, const struct lane *lane, int64_t number) {
    return number + lane->sent * writing->lanes;
}

static int may_send(const struct writing *writing, const struct lane *lane, int64_t number) {
    return next_row(writing, lane, number) < writing->count && lane->sent - lane->answered < writing->ahead;
}

/* Send what the connection takes now of its first command's start, or of its next value. */
static int send_some(struct writing *writing, struct lane *lane, int64_t number, hash_function *hash) {
    struct iovec pieces[3];
    int64_t row = next_row(writing, lane, number);
    int count = 1;
    if (!may_send(writing, lane, number)) return NOTHING;
    if (lane->put < 0) {
        pieces[0] = words_of(writing, number);
        pieces[0].iov_base = (char *)pieces[0].iov_base + pieces[0].iov_len + lane->put;
        pieces[0].iov_len = (size_t)-lane->put;
    } else {
        stamp_until(writing, row + 1, hash);
        count = pieces_of(writing, row, lane->put, pieces);
    }
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
    ssize_t put = sendmsg((int)lane->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) lane->result = RESET;
        return NOTHING;
    }
    lane->put += put;
    if (lane->put == HEADER_BYTES + writing->payload_bytes + (int64_t)words_of(writing, writing->lanes + row).iov_len) {
        lane->put = 0;
        lane->sent++;
    }
    return SOMETHING;
}

/* Which answer the bytes read ahead begin with. UNANSWERED: none that is expected, or with `*more` perhaps one. */
static unsigned char expected_answer(struct ahead *ahead, int *more) {
    static const struct {
        const char *line;
        int64_t bytes;
        unsigned char answer;
    } expected[] = {{"+OK\r\n", 5, STORED}, {"$-1\r\n", 5, PRESENT}, {"_\r\n", 3, PRESENT}};
    int64_t there = ahead->end - ahead->start;
    *more = 0;
    for (int which = 0; which < 3; which++) {
        int64_t bytes = expected[which].bytes;
        if (memcmp(ahead->bytes + ahead->start, expected[which].line, (size_t)(there < bytes ? there : bytes))) continue;
        if (there < bytes) {
            *more = 1;
            continue;
        }
        ahead->start += bytes;
        return expected[which].answer;
    }
    return UNANSWERED;
}

/* Receive what is there, no more than fits. */
static int receive_some(struct lane *lane) {
    struct ahead *ahead = &lane->ahead;
    memmove(ahead->bytes, ahead->bytes + ahead->start, (size_t)(ahead->end - ahead->start));
    ahead->end -= ahead->start;
    ahead->start = 0;
    ssize_t got = recv((int)lane->fd, ahead->bytes + ahead->end, (size_t)(ahead->capacity - ahead->end), MSG_DONTWAIT);
    if (got > 0) {
        ahead->end += got;
        return SOMETHING;
    }
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) lane->result = RESET;
    return NOTHING;
}

/* Take the answers that are there. */
static int take_answers(struct writing *writing, struct lane *lane, int64_t number) {
    int took = NOTHING, more;
    while (lane->result == GOES_ON && lane->answered < lane->sent) {
        unsigned char answer = expected_answer(&lane->ahead, &more);
        if (answer != UNANSWERED) {
            writing->answers[number + lane->answered++ * writing->lanes] = answer;
            took = SOMETHING;
        } else if (!more) {
            lane->result = DONE;
        } else if (!receive_some(lane)) {
            break;
        }
    }
    return took;
}

/* Sleep until there is something to do or `until_ns`. NOTHING: until then there was not. */
static int wait_for(const struct writing *writing, struct lane *lanes, int64_t until_ns) {
    struct pollfd events[LANES_MAX];
    nfds_t count = 0;
    for (int64_t number = 0; number < writing->lanes; number++) {
        if (lanes[number].result != GOES_ON) continue;
        const struct lane *lane = lanes + number;
        int wanted = (may_send(writing, lane, number) ? POLLOUT : 0) | (lane->answered < lane->sent ? POLLIN : 0);
        events[count++] = (struct pollfd){.fd = (int)lane->fd, .events = (short)wanted};
    }
    int64_t left_ns;
    while ((left_ns = until_ns - now_ns()) > 0) {
        int ready = poll(events, count, (int)((left_ns + 999999) / 1000000));
        if (ready > 0 || (ready < 0 && errno != EINTR)) return SOMETHING;
    }
    return NOTHING;
}

static int64_t values_of(const struct writing *writing, int64_t number) {
    return (writing->count - number + writing->lanes - 1) / writing->lanes;
}

/* Store what is left of `writing`; each lane says how far it came. */
void whalepod_write_lanes(struct writing *writing, struct lane *lanes, hash_function *hash, int64_t timeout_ns) {
    int64_t until_ns = now_ns() + timeout_ns;
    for (int64_t number = 0; number < writing->lanes; number++) lanes[number].result = GOES_ON;
    for (;;) {
        int did = NOTHING, going = 0;
        int64_t sent_until = 0;
        for (int64_t number = 0; number < writing->lanes; number++) {
            struct lane *lane = lanes + number;
            if (lane->result != GOES_ON) continue;
            did |= take_answers(writing, lane, number);
            if (lane->answered == values_of(writing, number)) lane->result = DONE;
            if (lane->result != GOES_ON) continue;
            did |= send_some(writing, lane, number, hash);
            int64_t row = next_row(writing, lane, number);
            if (row > sent_until) sent_until = row;
            going += lane->result == GOES_ON;
        }
        if (!going) return;
        if (did == NOTHING && writing->stamp && writing->stamped <= sent_until && writing->stamped < writing->count) {
            stamp_until(writing, writing->stamped + 1, hash);  /* while the server is busy */
        } else if (now_ns() >= until_ns || (did == NOTHING && !wait_for(writing, lanes, until_ns))) {
            break;
        }
    }
    for (int64_t number = 0; number < writing->lanes; number++) {
        if (lanes[number].result == GOES_ON) lanes[number].result = TIMED_OUT;
    }
}
