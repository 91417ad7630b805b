/* Choosing: experts of a row, entries of global KV. */

/* logits [rows, experts], bias [experts] or [rows, experts] -> ids and weights [rows, chosen]. */
void whalepod_route(const float *logits, const float *bias, int64_t *ids, float *weights, int64_t rows, int64_t experts,
                    int64_t bias_step, int64_t chosen, float factor, float sum_min) {
    for (int64_t row = 0; row < rows; row++) {
        const float *own = logits + row * experts, *extra = bias + row * bias_step;
        int64_t *to = ids + row * chosen;
        float *share = weights + row * chosen, total = 0;
        for (int64_t k = 0; k < chosen; k++) {
            float best = 0;
            to[k] = -1;
            for (int64_t e = 0; e < experts; e++) {
                int taken = 0;
                for (int64_t before = 0; before < k; before++) taken |= to[before] == e;
                float score = root(softplus(own[e])), biased = score + extra[e];
                if (taken || (to[k] >= 0 && !(biased > best))) continue;
                best = biased;
                to[k] = e;
                share[k] = score;
            }
            total += share[k];
        }
        for (int64_t k = 0; k < chosen; k++) share[k] = (chosen > 1 ? share[k] / (total + sum_min) : share[k]) * factor;
    }
}

/* The count-th largest of `values`, which are moved about. */
static float nth_largest(float *values, int64_t total, int64_t count) {
    int64_t low = 0, high = total - 1, wanted = count - 1;
    while (low < high) {
        float pivot = values[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i <= j) {
                float moved = values[i];
                values[i++] = values[j];
                values[j--] = moved;
            }
        }
        if (wanted <= j)
            high = j;
        else if (wanted >= i)
            low = i;
        else
            break;
    }
    return values[wanted];
}

/* Marks the `count` best allowed scores, all if there are fewer; of equal ones those of the lowest index. */
static void mark_best(const float *scores, const uint8_t *allowed, uint8_t *marks, float *room, int64_t entries,
                      int64_t count) {
    int64_t some = 0, above = 0;
    for (int64_t i = 0; i < entries; i++)
        if (allowed[i]) room[some++] = scores[i];
    if (some <= count) {
        memcpy(marks, allowed, (size_t)entries);
        return;
    }
    float last = nth_largest(room, some, count);
    for (int64_t i = 0; i < entries; i++) above += allowed[i] && scores[i] > last;
    int64_t left = count - above;
    for (int64_t i = 0; i < entries; i++) {
        int equal = allowed[i] && scores[i] == last && left > 0;
        left -= equal;
        marks[i] = (uint8_t)(equal || (allowed[i] && scores[i] > last));
    }
}

/* scores and allowed [rows, entries] -> [rows, count], ascending, then -1. 0: no memory. */
int whalepod_select_top(const float *scores, const uint8_t *allowed, int64_t *selected, int64_t rows, int64_t entries,
                        int64_t count) {
    float *room = malloc((size_t)entries * (sizeof *room + 1) + 1);
    uint8_t *marks = (uint8_t *)(room + entries);
    for (int64_t row = 0; room && row < rows; row++) {
        int64_t *to = selected + row * count, some = 0;
        mark_best(scores + row * entries, allowed + row * entries, marks, room, entries, count);
        for (int64_t i = 0; i < entries; i++)
            if (marks[i] && some < count) to[some++] = i; /* no numbers, no order: at most that many */
        for (; some < count; some++) to[some] = -1;
    }
    int done = room != 0;
    free(room);
    return done;
}

/* scores [rows, entries], visible [rows] -> mask [rows, entries]: the entries of the `top_blocks` best blocks. 0: no
 * memory. */
int whalepod_candidate_mask(const float *scores, const int64_t *visible, uint8_t *mask, int64_t rows, int64_t entries,
                            int64_t block, int64_t top_blocks) {
    int64_t blocks = (entries + block - 1) / block;
    float *best = malloc((size_t)blocks * (2 * sizeof *best + 2) + 1), *room = best + blocks;
    uint8_t *seen = (uint8_t *)(room + blocks), *kept = seen + blocks;
    for (int64_t row = 0; best && row < rows; row++) {
        int64_t count = visible[row] < entries ? visible[row] : entries, newest = (visible[row] - 1) / block;
        memset(seen, 0, (size_t)blocks);
        for (int64_t i = 0; i < count; i++) {
            int64_t b = i / block;
            best[b] = seen[b] ? larger(best[b], scores[row * entries + i]) : scores[row * entries + i];
            seen[b] = 1;
        }
        if (visible[row] > 0 && newest < blocks) best[newest] = __builtin_inff();
        mark_best(best, seen, kept, room, blocks, top_blocks);
        for (int64_t i = 0; i < entries; i++) mask[row * entries + i] = kept[i / block];
    }
    int done = best != 0;
    free(best);
    return done;
}
