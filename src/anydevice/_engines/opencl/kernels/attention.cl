// Attention without a matrix of scores: one pass over the keys with an online softmax (Milakov and
// Gimelshein 2018; flash attention, Dao et al. 2022): sums are rescaled when a larger score comes.
//
// q is (batch, heads, queries, SIZE), k and v (batch, heads / REPEAT, keys, SIZE), with strides; the
// last axis is in one piece. Which keys a query sees: the first `valid` ones; with a window of 0 or
// more (causal) only up to its own place, counted from the last valid key; of these with a window of
// 1 or more only so many; and those that the mask says. What is not seen enters no sum, whatever it is.

#define NOTHING (-INFINITY)

typedef struct {
    INDEX low, high;
} range;

range seen_range(const INDEX query, const INDEX queries, const INDEX valid, const INDEX window)
{
    range seen = {0, valid};
    if (window >= 0) {
        const INDEX last = valid - queries + query;
        seen.high = min(valid, last + 1);
        if (window > 0)
            seen.low = max((INDEX)0, last + 1 - window);
    }
    return seen;
}

#define ARGUMENTS                                                                                  \
    const INDEX heads, const INDEX queries, const INDEX keys, const INDEX window,                  \
        const NUMBER scale, __global const ELEMENT *q, const INDEX q_start, const INDEX q_batch,   \
        const INDEX q_head, const INDEX q_row, __global const ELEMENT *k, const INDEX k_start,     \
        const INDEX k_batch, const INDEX k_head, const INDEX k_row, __global const ELEMENT *v,     \
        const INDEX v_start, const INDEX v_batch, const INDEX v_head, const INDEX v_row,           \
        __global ELEMENT *result LENGTHS_ARGUMENTS MASK_ARGUMENTS

#if HAS_LENGTHS
#define LENGTHS_ARGUMENTS                                                                          \
    , __global const LENGTH_ELEMENT *lengths, const INDEX lengths_start, const INDEX lengths_batch
#define VALID(batch)                                                                               \
    (INDEX) clamp((long)lengths[lengths_start + (batch) * lengths_batch], (long)0, (long)keys)
#else
#define LENGTHS_ARGUMENTS
#define VALID(batch) keys
#endif

#if HAS_MASK
#define MASK_ARGUMENTS                                                                             \
    , __global const uchar *mask, const INDEX mask_start, const INDEX mask_batch,                  \
        const INDEX mask_head, const INDEX mask_query, const INDEX mask_key
#define MASK_ROW(batch, head, query)                                                               \
    (mask_start + (batch) * mask_batch + (head) * mask_head + (query) * mask_query)
#define MASKED(mask_row, key) (!mask[(mask_row) + (key) * mask_key])
#else
#define MASK_ARGUMENTS
#define MASK_ROW(batch, head, query) 0
#define MASKED(mask_row, key) false
#endif

// One work item for a query: for CPUs, and wherever nothing else fits. WIDTH divides SIZE.

#if WIDTH == 1
typedef NUMBER piece;
#define LOAD_PIECE(p, i) ((NUMBER)LOAD(p, i))
#define SUM_OF(x) (x)
#else
typedef JOIN(NUMBER, 8) piece;
#define LOAD_PIECE(p, i) JOIN(load8_, NAME)(p, (size_t)(i) * 8)
#define SUM_OF(x) sum_of_eight(x)
NUMBER sum_of_eight(const piece x)
{
    const JOIN(NUMBER, 4) y = x.lo + x.hi;
    return (y.s0 + y.s1) + (y.s2 + y.s3);
}
#endif
#define PIECES (SIZE / WIDTH)

__kernel void attention_by_item(const INDEX count, ARGUMENTS)
{
    const INDEX item = get_global_id(0);
    if (item >= count)
        return;
    const INDEX query = item % queries;
    const INDEX head = item / queries % heads;
    const INDEX batch = item / queries / heads;
    __global const ELEMENT *q_from = q + q_start + batch * q_batch + head * q_head + query * q_row;
    __global const ELEMENT *k_from = k + k_start + batch * k_batch + head / REPEAT * k_head;
    __global const ELEMENT *v_from = v + v_start + batch * v_batch + head / REPEAT * v_head;
    const size_t mask_row = MASK_ROW(batch, head, query);
    const range seen = seen_range(query, queries, VALID(batch), window);
    piece mine[PIECES];
    piece sums[PIECES];
    for (int i = 0; i < PIECES; i++) {
        mine[i] = LOAD_PIECE(q_from, i) * scale;
        sums[i] = (piece)(0);
    }
    NUMBER most = NOTHING;
    NUMBER total = 0;
    for (INDEX key = seen.low; key < seen.high; key++) {
        if (MASKED(mask_row, key))
            continue;
        piece dot = (piece)(0);
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            dot += mine[i] * LOAD_PIECE(k_from + (size_t)key * k_row, i);
        const NUMBER score = SUM_OF(dot);
        if (score > most) {
            const NUMBER down = exp(most - score);
            total *= down;
#pragma unroll
            for (int i = 0; i < PIECES; i++)
                sums[i] *= down;
            most = score;
        }
        const NUMBER share = score == NOTHING ? (NUMBER)0 : exp(score - most);
        total += share;
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            sums[i] += share * LOAD_PIECE(v_from + (size_t)key * v_row, i);
    }
    const NUMBER inverse = total == 0 ? (NUMBER)0 : 1 / total;
    for (int i = 0; i < PIECES; i++) {
        const piece out = sums[i] * inverse;
        const size_t at = (size_t)item * SIZE + i * WIDTH;
#if WIDTH == 1
        STORE(result, at, out);
#else
        JOIN(store8_, NAME)(result, at, out);
#endif
    }
}

// Flash-decoding (Dao et al. 2023): one group for a query and a segment of its keys, for few
// queries on GPUs. Each item has a key at a time and then a few of the numbers of the result. With
// several segments `shares` gets the sums of each, and its maximum and total behind them, for
// `join_segments`.

#define NUMBERS_EACH ((SIZE + GROUP - 1) / GROUP)

__kernel void attention_by_query(const INDEX segments, __global NUMBER *shares, ARGUMENTS)
{
    __local piece pieces_of_mine[PIECES];
    __local NUMBER *mine = (__local NUMBER *)pieces_of_mine;
    __local NUMBER scores[GROUP];
    __local NUMBER shared[GROUP];
    const int lane = get_local_id(0);
    const INDEX segment = get_group_id(0) % segments;
    const INDEX item = get_group_id(0) / segments;
    const INDEX query = item % queries;
    const INDEX head = item / queries % heads;
    const INDEX batch = item / queries / heads;
    __global const ELEMENT *q_from = q + q_start + batch * q_batch + head * q_head + query * q_row;
    __global const ELEMENT *k_from = k + k_start + batch * k_batch + head / REPEAT * k_head;
    __global const ELEMENT *v_from = v + v_start + batch * v_batch + head / REPEAT * v_head;
    const size_t mask_row = MASK_ROW(batch, head, query);
    range seen = seen_range(query, queries, VALID(batch), window);
    const INDEX chunk = (max((INDEX)0, seen.high - seen.low) + segments - 1) / segments;
    seen.low += segment * chunk;
    seen.high = min(seen.high, seen.low + chunk);
    for (int i = lane; i < SIZE; i += GROUP)
        mine[i] = (NUMBER)LOAD(q_from, i) * scale;
    barrier(CLK_LOCAL_MEM_FENCE);
    NUMBER sums[NUMBERS_EACH];
    for (int i = 0; i < NUMBERS_EACH; i++)
        sums[i] = 0;
    NUMBER most = NOTHING;
    NUMBER total = 0;
    for (INDEX first = seen.low; first < seen.high; first += GROUP) {
        const INDEX key = first + lane;
        NUMBER score = NOTHING;
        const bool visible = key < seen.high && !MASKED(mask_row, key);
        if (visible) {
            __global const ELEMENT *row = k_from + (size_t)key * k_row;
            piece dot = (piece)(0);
            for (int i = 0; i < PIECES; i++)
                dot += pieces_of_mine[i] * LOAD_PIECE(row, i);
            score = SUM_OF(dot);
        }
        shared[lane] = score;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int half_of = GROUP / 2; half_of > 0; half_of /= 2) {
            if (lane < half_of)
                shared[lane] = fmax(shared[lane], shared[lane + half_of]);
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        const NUMBER larger = fmax(most, shared[0]);
        const NUMBER base = larger == NOTHING ? (NUMBER)0 : larger;
        const NUMBER down = exp(most - base);
        barrier(CLK_LOCAL_MEM_FENCE);
        const NUMBER share = visible && score != NOTHING ? exp(score - base) : (NUMBER)0;
        scores[lane] = share;
        shared[lane] = share;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int half_of = GROUP / 2; half_of > 0; half_of /= 2) {
            if (lane < half_of)
                shared[lane] += shared[lane + half_of];
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        total = total * down + shared[0];
        most = larger;
        const int filled = (int)min((INDEX)GROUP, seen.high - first);
        for (int i = 0; i < NUMBERS_EACH; i++) {
            const int place = lane + i * GROUP;
            NUMBER sum = sums[i] * down;
            if (place < SIZE)
                for (int j = 0; j < filled; j++)
                    if (!MASKED(mask_row, first + j))
                        sum += scores[j] * (NUMBER)LOAD(v_from, (size_t)(first + j) * v_row + place);
            sums[i] = sum;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    const NUMBER inverse = total == 0 ? (NUMBER)0 : 1 / total;
    for (int i = 0; i < NUMBERS_EACH; i++) {
        const int place = lane + i * GROUP;
        if (place < SIZE && segments == 1)
            STORE(result, (size_t)item * SIZE + place, sums[i] * inverse);
        else if (place < SIZE)
            shares[(size_t)get_group_id(0) * (SIZE + 2) + place] = sums[i];
    }
    if (segments > 1 && lane == 0) {
        shares[(size_t)get_group_id(0) * (SIZE + 2) + SIZE] = most;
        shares[(size_t)get_group_id(0) * (SIZE + 2) + SIZE + 1] = total;
    }
}

__kernel void join_segments(const INDEX count,
                            const INDEX segments,
                            __global const NUMBER *shares,
                            __global ELEMENT *result)
{
    const size_t item = get_global_id(0);
    if (item >= (size_t)count)
        return;
    const INDEX row = item / SIZE;
    const INDEX place = item % SIZE;
    __global const NUMBER *from = shares + (size_t)row * segments * (SIZE + 2);
    NUMBER most = NOTHING;
    for (INDEX s = 0; s < segments; s++)
        most = fmax(most, from[s * (SIZE + 2) + SIZE]);
    NUMBER sum = 0;
    NUMBER total = 0;
    for (INDEX s = 0; s < segments; s++) {
        const NUMBER own = from[s * (SIZE + 2) + SIZE];
        const NUMBER down = own == NOTHING && most == NOTHING ? (NUMBER)1 : exp(own - most);
        sum += from[s * (SIZE + 2) + place] * down;
        total += from[s * (SIZE + 2) + SIZE + 1] * down;
    }
    STORE(result, item, total == 0 ? (NUMBER)0 : sum / total);
}
