// Metal's address spaces as those of OpenCL C++, which libclang checks, for the lint of test_metal_source.py. Declarations only.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define __METAL_VERSION__ 310
#define device      __global
#define constant    __constant
#define threadgroup __local
#define thread      __private
#define nullptr     0

typedef signed char    int8_t;
typedef unsigned char  uint8_t, uchar;
typedef short          int16_t;
typedef unsigned short uint16_t, ushort;
typedef int            int32_t;
typedef unsigned int   uint32_t, uint;
typedef long           int64_t;
typedef unsigned long  uint64_t, ulong, size_t;

#define VECTORS(t) typedef t t##2 __attribute__((ext_vector_type(2))); typedef t t##3 __attribute__((ext_vector_type(3))); \
                   typedef t t##4 __attribute__((ext_vector_type(4)));
VECTORS(float)
VECTORS(half)
VECTORS(int)
VECTORS(uint)
VECTORS(short)
VECTORS(ushort)

template <typename V, int C> struct matrix {
    V c[C];
    matrix() = default;
    __private V & operator[](int i) __private;
};
typedef matrix<half4, 4> half4x4;

template <typename T, typename U> T as_type(U);
template <typename T> T min(T, T);
template <typename T> T max(T, T);
float exp(float);
float fabs(float);
float sign(float);
float4 exp(float4);

float simd_sum(float);
float simd_shuffle_xor(float, ushort);
enum class mem_flags { mem_none, mem_threadgroup };
void threadgroup_barrier(mem_flags);
namespace metal {}
