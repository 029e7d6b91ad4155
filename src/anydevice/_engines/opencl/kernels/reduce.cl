// Sums, largest and smallest along axes: blocked summation (Higham 1993, The accuracy of floating
// point summation) of eight strands, then a tree reduction in local memory.
//
// A unit of work is one segment of the elements behind one result. COOPERATE makes a group of work
// items a unit; without it each item is one. JOIN_TWO(a, b) and NEUTRAL say what is computed.
// KEPT_* and RUN_* walk through the axes that stay and those that go.

__kernel void reduce(const INDEX units,
                     const INDEX segments,
                     const INDEX count,
                     const INDEX chunk,
                     __global const ELEMENT *x,
                     const INDEX start,
                     __global RESULT_ELEMENT *result KEPT_SIZES RUN_SIZES KEPT_STRIDES RUN_STRIDES)
{
#if COOPERATE
    __local NUMBER shared[GROUP];
    const INDEX unit = get_group_id(0);
    const int lane = get_local_id(0);
    const int lanes = GROUP;
#else
    const INDEX unit = get_global_id(0);
    const int lane = 0;
    const int lanes = 1;
    if (unit >= units)
        return;
#endif
    const INDEX output = unit / segments;
    const INDEX first = unit % segments * chunk;
    const INDEX last = min(first + chunk, count);
    KEPT_OFFSETS
    __global const ELEMENT *from = x + start + output_at_x;
    NUMBER total = NEUTRAL;
    // Short sums of eight strands, added to the total: exact enough for millions of terms.
    for (INDEX block = first; block < last; block += 1024 * lanes) {
        const INDEX end = min(block + 1024 * lanes, last);
        NUMBER strands[8];
        for (int s = 0; s < 8; s++)
            strands[s] = NEUTRAL;
        INDEX base = block + lane;
        for (; base + 7 * lanes < end; base += 8 * lanes) {
#pragma unroll
            for (int s = 0; s < 8; s++) {
                const INDEX term = base + s * lanes;
                RUN_OFFSETS
                strands[s] = JOIN_TWO(strands[s], (NUMBER)LOAD(from, term_at_x));
            }
        }
        for (; base < end; base += lanes) {
            const INDEX term = base;
            RUN_OFFSETS
            strands[0] = JOIN_TWO(strands[0], (NUMBER)LOAD(from, term_at_x));
        }
        for (int s = 4; s > 0; s /= 2)
            for (int t = 0; t < s; t++)
                strands[t] = JOIN_TWO(strands[t], strands[t + s]);
        total = JOIN_TWO(total, strands[0]);
    }
#if COOPERATE
    shared[lane] = total;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int half_of = GROUP / 2; half_of > 0; half_of /= 2) {
        if (lane < half_of)
            shared[lane] = JOIN_TWO(shared[lane], shared[lane + half_of]);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    total = shared[0];
    if (lane == 0)
#endif
        RESULT_STORE(result, unit, total);
}
