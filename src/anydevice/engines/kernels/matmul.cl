// The product of two matrices in C order: one work item for one number of the product.
// NUMBER is float or double. Neighbouring items read neighbouring columns of b.

#ifdef cl_khr_fp64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif

__kernel void matmul(__global const NUMBER *a,
                     __global const NUMBER *b,
                     __global NUMBER *product,
                     const int columns,
                     const int inner)
{
    const size_t column = get_global_id(0);
    const size_t row = get_global_id(1);
    NUMBER sum = 0;
    for (int k = 0; k < inner; k++)
        sum += a[row * inner + k] * b[(size_t)k * columns + column];
    product[row * columns + column] = sum;
}
