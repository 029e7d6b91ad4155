// How numbers of each type are read from memory and written to it.
//
// Numbers of 16 bits are kept as ushort and computed with as float: neither needs an extension.

#if defined(cl_khr_fp64) && !defined(cl_amd_fp64)
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

// Floating numbers of 16 bits, as the bits that they are kept in.

float as_bfloat16(const ushort bits)
{
    return as_float((uint)bits << 16);
}

ushort to_bfloat16(const float value)
{
    const uint bits = as_uint(value);
    if (isnan(value))
        return (ushort)((bits >> 16) | 0x40);
    return (ushort)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // the nearest, of two the even one
}

float load_float16(__global const ushort *p, const size_t i)
{
    return vload_half(i, (__global const half *)p);
}

void store_float16(__global ushort *p, const size_t i, const float value)
{
    vstore_half_rte(value, i, (__global half *)p);
}

float load_bfloat16(__global const ushort *p, const size_t i)
{
    return as_bfloat16(p[i]);
}

void store_bfloat16(__global ushort *p, const size_t i, const float value)
{
    p[i] = to_bfloat16(value);
}

#ifdef cl_khr_fp64
// Rounded to odd on the way, so that rounding twice gives what rounding once would give.
float narrowed(const double value)
{
    const float near = convert_float_rtz(value);
    return isnan(value) || isinf(near) || (double)near == value ? near
                                                                : as_float(as_uint(near) | 1);
}
#endif

#define load_bool(p, i) ((p)[i])
#define load_int8(p, i) ((p)[i])
#define load_int16(p, i) ((p)[i])
#define load_int32(p, i) ((p)[i])
#define load_int64(p, i) ((p)[i])
#define load_uint8(p, i) ((p)[i])
#define load_uint16(p, i) ((p)[i])
#define load_uint32(p, i) ((p)[i])
#define load_uint64(p, i) ((p)[i])
#define load_float32(p, i) ((p)[i])
#define load_float64(p, i) ((p)[i])

#define store_bool(p, i, value) (p)[i] = ((value) != 0)
#define store_int8(p, i, value) (p)[i] = (value)
#define store_int16(p, i, value) (p)[i] = (value)
#define store_int32(p, i, value) (p)[i] = (value)
#define store_int64(p, i, value) (p)[i] = (value)
#define store_uint8(p, i, value) (p)[i] = (value)
#define store_uint16(p, i, value) (p)[i] = (value)
#define store_uint32(p, i, value) (p)[i] = (value)
#define store_uint64(p, i, value) (p)[i] = (value)
#define store_float32(p, i, value) (p)[i] = (value)
#define store_float64(p, i, value) (p)[i] = (value)

// Four or eight floating numbers at once, at a place that is a multiple of four or eight.

#define load4_float16(p, i) vloada_half4((i) / 4, (__global const half *)(p))
#define load8_float16(p, i) vloada_half8((i) / 8, (__global const half *)(p))
#define load4_bfloat16(p, i)                                                                       \
    as_float4(convert_uint4(*(__global const ushort4 *)((p) + (i))) << 16)
#define load8_bfloat16(p, i)                                                                       \
    as_float8(convert_uint8(*(__global const ushort8 *)((p) + (i))) << 16)
#define load4_float32(p, i) (*(__global const float4 *)((p) + (i)))
#define load8_float32(p, i) (*(__global const float8 *)((p) + (i)))
#define load4_float64(p, i) (*(__global const double4 *)((p) + (i)))
#define load8_float64(p, i) (*(__global const double8 *)((p) + (i)))

ushort4 to_bfloat16_4(const float4 values)
{
    const uint4 bits = as_uint4(values);
    const uint4 nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return convert_ushort4(select(nearest, (bits >> 16) | 0x40, isnan(values)));
}

ushort8 to_bfloat16_8(const float8 values)
{
    const uint8 bits = as_uint8(values);
    const uint8 nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return convert_ushort8(select(nearest, (bits >> 16) | 0x40, isnan(values)));
}

#define store4_float16(p, i, value) vstorea_half4_rte(value, (i) / 4, (__global half *)(p))
#define store8_float16(p, i, value) vstorea_half8_rte(value, (i) / 8, (__global half *)(p))
#define store4_bfloat16(p, i, value) *(__global ushort4 *)((p) + (i)) = to_bfloat16_4(value)
#define store8_bfloat16(p, i, value) *(__global ushort8 *)((p) + (i)) = to_bfloat16_8(value)
#define store4_float32(p, i, value) *(__global float4 *)((p) + (i)) = (value)
#define store8_float32(p, i, value) *(__global float8 *)((p) + (i)) = (value)
#define store4_float64(p, i, value) *(__global double4 *)((p) + (i)) = (value)
#define store8_float64(p, i, value) *(__global double8 *)((p) + (i)) = (value)
