// The kernels of sglcache.testing.card: what a runner's kernels would do, as small as it can be asked of a card.
//
// kernels.ptx beside this file is made from it by scripts/kernels.sh, and is what is loaded: a card's driver compiles it
// for the card.
//
// Sizes are in words of 8 bytes unless they say bytes. Each kernel is right for any grid.

typedef unsigned char u8;
typedef unsigned long long u64;
typedef float f32;

static __device__ __forceinline__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

static __device__ __forceinline__ u64 first() { return blockIdx.x * (u64)blockDim.x + threadIdx.x; }
static __device__ __forceinline__ u64 step() { return gridDim.x * (u64)blockDim.x; }

// dst[i] = value
extern "C" __global__ void sgl_fill(u64* dst, u64 value, u64 words) {
    for (u64 i = first(); i < words; i += step()) dst[i] = value;
}

// Keeps its stream busy.
extern "C" __global__ void sgl_spin_ns(u64 ns) {
    u64 start = now_ns();
    while (now_ns() - start < ns) {
    }
}

// For `ns`, an ever rising counter to all words, from 1 on.
extern "C" __global__ void sgl_scribble(u64* dst, u64 words, u64 ns) {
    volatile u64* out = dst;
    u64 start = now_ns();
    for (u64 count = 1; now_ns() - start < ns; count++)
        for (u64 i = first(); i < words; i += step()) out[i] = count;
}

// Until *flag is `value` or more.
extern "C" __global__ void sgl_wait_flag(volatile u64* flag, u64 value) {
    while (*flag < value) {
    }
    __threadfence_system();
}

// dst[i] = begin + i
extern "C" __global__ void sgl_count(u64* dst, u64 words, u64 begin) {
    for (u64 i = first(); i < words; i += step()) dst[i] = begin + i;
}

// dst[i] = src[i]: as much memory as it can, which is what decoding is bound by.
extern "C" __global__ void sgl_copy(u64* dst, const u64* src, u64 words) {
    for (u64 i = first(); i < words; i += step()) dst[i] = src[i];
}

// Chunk j of chunk_bytes, from src + src_offsets[j] to dst + dst_offsets[j]. All of these are multiples of 16 bytes.
extern "C" __global__ void sgl_gather(u8* dst, const u8* src, const u64* dst_offsets, const u64* src_offsets,
                                      u64 chunk_bytes, u64 num_chunks) {
    u64 vectors = chunk_bytes / sizeof(uint4);
    for (u64 j = blockIdx.x; j < num_chunks; j += gridDim.x) {
        uint4* to = (uint4*)(dst + dst_offsets[j]);
        const uint4* from = (const uint4*)(src + src_offsets[j]);
        for (u64 i = threadIdx.x; i < vectors; i += blockDim.x) to[i] = from[i];
    }
}

// Multiply-adds alone; sink is one f32, which is written so that they are not left out.
extern "C" __global__ void sgl_burn(f32* sink, u64 iterations) {
    f32 a = 1.0f + threadIdx.x, b = 0.5f, c = 0.25f, d = 0.125f;
    for (u64 i = 0; i < iterations; i++) {
        a = a * 0.999f + b;
        b = b * 0.999f + c;
        c = c * 0.999f + d;
        d = d * 0.999f + a;
    }
    if (a + b + c + d == -1.0f) *sink = a;
}
