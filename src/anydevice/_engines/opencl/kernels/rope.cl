// Rotary embedding (Su et al. 2021): rotates pairs of numbers, one work item for a pair.
//
// x is (batch, heads, tokens, size) with strides. INTERLEAVED pairs are neighbours, others lie half
// the size apart. The angles, their sines and cosines are float, whatever the numbers are.

__kernel void rope(const INDEX count,
                   const INDEX heads,
                   const INDEX tokens,
                   const INDEX pairs,
                   __global const ELEMENT *x,
                   const INDEX start,
                   const INDEX x_batch,
                   const INDEX x_head,
                   const INDEX x_token,
                   const INDEX x_number,
                   __global const PLACE_ELEMENT *positions,
                   const INDEX positions_start,
                   const INDEX positions_batch,
                   const INDEX positions_token,
                   __global const float *frequencies,
                   __global ELEMENT *result)
{
    const size_t item = get_global_id(0);
    if (item >= (size_t)count)
        return;
    const INDEX pair = item % pairs;
    const INDEX token = item / pairs % tokens;
    const INDEX head = item / pairs / tokens % heads;
    const INDEX batch = item / pairs / tokens / heads;
    const float position = positions[positions_start + batch * positions_batch +
                                     token * positions_token];
    const float angle = position * frequencies[pair];
    const NUMBER cosine = cos(angle);
    const NUMBER sine = sin(angle);
#if INTERLEAVED
    const INDEX one = 2 * pair;
    const INDEX two = 2 * pair + 1;
#else
    const INDEX one = pair;
    const INDEX two = pair + pairs;
#endif
    const size_t from = start + batch * x_batch + head * x_head + token * x_token;
    const size_t to = item / pairs * 2 * pairs;
    const NUMBER first = LOAD(x, from + one * x_number);
    const NUMBER second = LOAD(x, from + two * x_number);
    STORE(result, to + one, first * cosine - second * sine);
    STORE(result, to + two, second * cosine + first * sine);
}
