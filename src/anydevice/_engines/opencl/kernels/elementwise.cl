// One work item for one element of the result.
//
// OPERANDS are the arguments for each array (pointer, first element, strides), PLACES the sizes of
// the axes; OFFSETS computes from `item` where each array's element is, READ reads the operands, and
// BODY computes and writes. All of them are put before this text.

#if INTEGER_POWERS
// A power of integers by repeated squaring; a negative exponent is rounded towards zero.
NUMBER integer_power(NUMBER base, NUMBER exponent)
{
    if (exponent < 0)
        return base == 1 ? 1 : base == (NUMBER)-1 ? (exponent % 2 ? -1 : 1) : 0;
    NUMBER power = 1;
    for (; exponent > 0; exponent /= 2) {
        if (exponent % 2)
            power *= base;
        base *= base;
    }
    return power;
}
#endif

#if FLOOR_DIVISIONS
// A quotient rounded down, from what the exact remainder leaves: `floor(a / b)` may be 1 too large.
NUMBER floor_division(NUMBER a, NUMBER b)
{
    const bool below = (a < 0 && b > 0) || (a > 0 && b < 0);
    if (isinf(a) || b == 0)
        return a / b;
    if (isinf(b))
        return below ? -1 : a / b;
    const NUMBER rest = fmod(a, b);
    return rint((a - rest) / b) - (rest != 0 && below ? 1 : 0);
}
#endif

__kernel void elementwise(const INDEX count PLACES OPERANDS)
{
    const size_t item = get_global_id(0);
    if (item >= (size_t)count)
        return;
    OFFSETS
    READ
    BODY
}
