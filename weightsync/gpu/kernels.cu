// What a commit, its proof, a search for changes and a digest do on the device, each in one launch
// for all parameters, or in a few.
//
// Compiled by NVRTC when a worker starts, and by a trainer that encodes deltas on its GPU;
// `device_kernels.py` launches it and says what the arguments are.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A range of bytes on both sides, each at a multiple of 16; `flag` is where its answer goes.
struct Span {
    u64 live;
    u64 staged;
    u32 size;
    u32 flag;
};

// Independent loads of a thread: enough are under way to use all of the memory's bandwidth.
#define DEEP 8

extern "C" __global__ void copy_spans(const Span* spans) {
    const Span span = spans[blockIdx.x];
    const uint4* from = (const uint4*)span.staged;
    uint4* to = (uint4*)span.live;
    const u32 count = span.size / 16, step = blockDim.x;
    u32 at = threadIdx.x;
    for (; at + (DEEP - 1) * step < count; at += DEEP * step) {
        uint4 row[DEEP];
#pragma unroll
        for (int i = 0; i < DEEP; i++) row[i] = from[at + i * step];
#pragma unroll
        for (int i = 0; i < DEEP; i++) to[at + i * step] = row[i];
    }
    for (; at < count; at += step) to[at] = from[at];
    const u32 rest = count * 16 + threadIdx.x;
    if (rest < span.size) ((u8*)to)[rest] = ((const u8*)from)[rest];
}

// Has this thread look at its share of `count` pairs of 16 bytes, each with its index.
template <typename Look>
__device__ __forceinline__ void each_pair(const uint4* left, const uint4* right, u32 count,
                                          Look look) {
    const u32 step = blockDim.x;
    u32 at = threadIdx.x;
    for (; at + (DEEP / 2 - 1) * step < count; at += DEEP / 2 * step) {
        uint4 a[DEEP / 2], b[DEEP / 2];
#pragma unroll
        for (int i = 0; i < DEEP / 2; i++) {
            a[i] = left[at + i * step];
            b[i] = right[at + i * step];
        }
#pragma unroll
        for (int i = 0; i < DEEP / 2; i++) look(at + i * step, a[i], b[i]);
    }
    for (; at < count; at += step) look(at, left[at], right[at]);
}

extern "C" __global__ void exchange_spans(const Span* spans) {
    const Span span = spans[blockIdx.x];
    uint4* left = (uint4*)span.live;
    uint4* right = (uint4*)span.staged;
    const u32 count = span.size / 16;
    each_pair(left, right, count, [&](u32 at, uint4 a, uint4 b) {
        left[at] = b;
        right[at] = a;
    });
    const u32 rest = count * 16 + threadIdx.x;
    if (rest < span.size) {
        const u8 kept = ((u8*)left)[rest];
        ((u8*)left)[rest] = ((u8*)right)[rest];
        ((u8*)right)[rest] = kept;
    }
}

__device__ __forceinline__ u32 unlike(uint4 left, uint4 right) {
    return (left.x ^ right.x) | (left.y ^ right.y) | (left.z ^ right.z) | (left.w ^ right.w);
}

extern "C" __global__ void compare_spans(const Span* spans, u8* flags) {
    const Span span = spans[blockIdx.x];
    const uint4* left = (const uint4*)span.live;
    const uint4* right = (const uint4*)span.staged;
    const u32 count = span.size / 16;
    u32 bad = 0;
    each_pair(left, right, count, [&](u32, uint4 a, uint4 b) { bad |= unlike(a, b); });
    const u32 rest = count * 16 + threadIdx.x;
    if (rest < span.size) bad |= ((const u8*)left)[rest] ^ ((const u8*)right)[rest];
    // Many may write: all write the same.
    if (bad) flags[span.flag] = 1;
}

// Bit i tells whether element i of 16 bytes differs.
template <typename Word> __device__ __forceinline__ u32 differing(uint4 left, uint4 right) {
    const Word* a = (const Word*)&left;
    const Word* b = (const Word*)&right;
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < 16 / sizeof(Word); i++) found |= (u32)(a[i] != b[i]) << i;
    return found;
}

// The sum of all threads before this one; `whole` becomes that of all. Every thread must come.
__device__ __forceinline__ u32 sum_before(u32 value, u32* warps, u32& whole) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 sum = value;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
        const u32 other = __shfl_up_sync(0xffffffff, sum, far);
        if (lane >= far) sum += other;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    u32 before = 0;
    whole = 0;
    for (u32 i = 0; i < blockDim.x / 32; i++) {
        if (i < warp) before += warps[i];
        whole += warps[i];
    }
    // The next sum may write there.
    __syncthreads();
    return before + sum - value;
}

// How many elements of each span differ. A span's size is a multiple of an element's.
template <typename Word> __device__ void count_changes(const Span* spans, u32* counts) {
    __shared__ u32 warps[32];
    const Span span = spans[blockIdx.x];
    const uint4* left = (const uint4*)span.live;
    const uint4* right = (const uint4*)span.staged;
    const u32 count = span.size / 16;
    u32 found = 0;
    each_pair(left, right, count,
              [&](u32, uint4 a, uint4 b) { found += __popc(differing<Word>(a, b)); });
    const u32 rest = count * (16 / sizeof(Word)) + threadIdx.x;
    if (rest < span.size / sizeof(Word))
        found += ((const Word*)left)[rest] != ((const Word*)right)[rest];
    u32 whole;
    sum_before(found, warps, whole);
    if (threadIdx.x == 0) counts[blockIdx.x] = whole;
}

// Elements of which it is known how many differ, in the order of their places: those of a span
// become the ones from `begins` of it to `begins` of the next. A place is counted from `row` on.
template <typename Word>
__device__ void take_changes(const Span* spans, const u64* begins, u64 row, u64* positions,
                             Word* values, u32* wrong) {
    __shared__ u32 warps[32];
    const Span span = spans[blockIdx.x];
    const Word* left = (const Word*)span.live;
    const Word* right = (const Word*)span.staged;
    const u64 first = (span.live - row) / sizeof(Word), end = begins[blockIdx.x + 1];
    const u32 each = 16 / sizeof(Word), whole = span.size / sizeof(Word);
    u64 begin = begins[blockIdx.x];
    for (u32 base = 0; base < whole; base += blockDim.x * each) {
        const u32 at = base + threadIdx.x * each;
        u32 found = 0;
        if (at + each <= whole) {
            found = differing<Word>(*(const uint4*)(left + at), *(const uint4*)(right + at));
        } else {
            // The last bytes, fewer than 16.
            for (u32 i = 0; at + i < whole; i++) found |= (u32)(left[at + i] != right[at + i]) << i;
        }
        u32 count;
        u64 to = begin + sum_before(__popc(found), warps, count);
        begin += count;
        for (; found && to < end; found &= found - 1, to++) {
            const u32 place = at + __ffs(found) - 1;
            positions[to] = first + place;
            values[to] = right[place];
        }
    }
    if (threadIdx.x == 0 && begin != end) *wrong = 1;
}

// Single elements, each place of which is there once, written from `row` on.
template <typename Word>
__device__ void write_places(Word* row, const u64* positions, const Word* values, u64 count) {
    const u64 begin = (u64)blockIdx.x * blockDim.x * DEEP + threadIdx.x;
    u64 places[DEEP];
    Word words[DEEP];
#pragma unroll
    for (int i = 0; i < DEEP; i++) {
        const u64 at = begin + i * blockDim.x;
        if (at < count) {
            places[i] = positions[at];
            words[i] = values[at];
        }
    }
#pragma unroll
    for (int i = 0; i < DEEP; i++)
        if (begin + i * blockDim.x < count) row[places[i]] = words[i];
}

#define OF_WIDTH(BITS, WORD)                                                                       \
    extern "C" __global__ void count_changes_##BITS(const Span* spans, u32* counts) {              \
        count_changes<WORD>(spans, counts);                                                        \
    }                                                                                              \
    extern "C" __global__ void take_changes_##BITS(const Span* spans, const u64* begins, u64 row,  \
                                                   u64* positions, WORD* values, u32* wrong) {     \
        take_changes<WORD>(spans, begins, row, positions, values, wrong);                          \
    }                                                                                              \
    extern "C" __global__ void write_places_##BITS(WORD* row, const u64* positions,                \
                                                   const WORD* values, u64 count) {                \
        write_places<WORD>(row, positions, values, count);                                         \
    }

OF_WIDTH(8, u8)
OF_WIDTH(16, u16)
OF_WIDTH(32, u32)
OF_WIDTH(64, u64)

// XXH3, 128 bits, of more than 240 bytes, seed 0, default secret: the specification in the
// repository of xxHash, doc/xxhash_spec.md. Names are those of the specification.

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull
#define PRIME_MX1 0x165667919E3779F9ull

#define LANES 8
#define STRIPE 64
#define BLOCK 1024
// Blocks whose sums are held at a time, and the warps that make them.
#define TILE 64
#define WARPS 16

__constant__ u8 SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

// A tensor's memory, at a multiple of 16.
struct Text {
    u64 begin;
    u64 size;
};

__device__ __forceinline__ u64 read64(const u8* at) {
    u64 value = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) value |= (u64)at[i] << (8 * i);
    return value;
}

__device__ __forceinline__ u64 product(u64 keyed) {
    return (u64)(u32)keyed * (u32)(keyed >> 32);
}

// One stripe, each of eight lanes its own accumulator.
__device__ __forceinline__ u64 accumulate(u64 acc, u64 value, u64 key) {
    return acc + product(value ^ key) + __shfl_xor_sync(0xff, value, 1);
}

__device__ __forceinline__ u64 fold(u64 left, u64 right) {
    return (left * right) ^ __umul64hi(left, right);
}

__device__ u64 final_merge(const u64* acc, int secret, u64 result) {
    for (int i = 0; i < LANES; i += 2)
        result += fold(acc[i] ^ read64(SECRET + secret + 8 * i),
                       acc[i + 1] ^ read64(SECRET + secret + 8 * i + 8));
    result ^= result >> 37;
    result *= PRIME_MX1;
    return result ^ (result >> 32);
}

// What all stripes of a block add to the accumulators, which no stripe depends on: a warp adds up
// two stripes a thread, two lanes of each.
__device__ __forceinline__ void sum_block(ulonglong2 near, ulonglong2 far, const u64* keys,
                                          u64* sums) {
    u64 even = product(near.x ^ keys[0]) + near.y + product(far.x ^ keys[2]) + far.y;
    u64 odd = product(near.y ^ keys[1]) + near.x + product(far.y ^ keys[3]) + far.x;
#pragma unroll
    for (int other = 4; other < 32; other *= 2) {
        even += __shfl_xor_sync(0xffffffff, even, other);
        odd += __shfl_xor_sync(0xffffffff, odd, other);
    }
    const int thread = threadIdx.x % 32;
    if (thread < 4) {
        sums[2 * thread] = even;
        sums[2 * thread + 1] = odd;
    }
}

// One tensor: while some warps add up blocks, another one chains the sums of those before.
extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32)
    digest_texts(const Text* texts, u64* digests) {
    __shared__ u64 sums[2][TILE][LANES];
    const Text text = texts[blockIdx.x];
    const u8* data = (const u8*)text.begin;
    const u64 blocks = (text.size - 1) / BLOCK;
    const u64 tiles = (blocks + TILE - 1) / TILE;
    const int warp = threadIdx.x / 32, thread = threadIdx.x % 32, lane = thread % LANES;
    const int stripe = thread / 4, pair = thread % 4;
    u64 keys[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        keys[i] = read64(SECRET + 8 * (stripe + 2 * pair + i % 2 + i / 2 * 8));
    const u64 first[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                              PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    u64 acc = first[lane];
    const u64 scramble = read64(SECRET + 128 + 8 * lane);
    for (u64 tile = 0; tile <= tiles; tile++) {
        if (warp < WARPS && tile < tiles) {
            const u64 begin = tile * TILE + warp * (TILE / WARPS);
            ulonglong2 near[TILE / WARPS], far[TILE / WARPS];
#pragma unroll
            for (int i = 0; i < TILE / WARPS; i++) {
                // Beyond the last block nothing is read; what is summed up there is not used.
                const u64 block = begin + i < blocks ? begin + i : 0;
                const ulonglong2* row = (const ulonglong2*)(data + block * BLOCK);
                near[i] = row[thread];
                far[i] = row[thread + 32];
            }
#pragma unroll
            for (int i = 0; i < TILE / WARPS; i++)
                sum_block(near[i], far[i], keys, sums[tile % 2][warp * (TILE / WARPS) + i]);
        }
        if (warp == WARPS && tile) {
            const u64 (*ready)[LANES] = sums[(tile - 1) % 2];
            const u64 left = blocks - (tile - 1) * TILE;
            const int count = left < TILE ? (int)left : TILE;
#pragma unroll 16
            for (int i = 0; i < count; i++) {
                acc += ready[i][lane];
                acc = (acc ^ (acc >> 47) ^ scramble) * PRIME32_1;
            }
        }
        __syncthreads();
    }
    if (warp != WARPS || thread >= LANES) return;
    const u8* end = data + blocks * BLOCK;
    const int stripes = (int)((text.size - 1 - blocks * BLOCK) / STRIPE);
    for (int i = 0; i < stripes; i++) {
        const u64 value = *(const u64*)(end + i * STRIPE + 8 * lane);
        acc = accumulate(acc, value, read64(SECRET + 8 * (i + lane)));
    }
    acc = accumulate(acc, read64(data + text.size - STRIPE + 8 * lane),
                     read64(SECRET + 192 - STRIPE - 7 + 8 * lane));
    sums[0][0][lane] = acc;
    __syncwarp(0xff);
    if (lane == 0)
        digests[2 * blockIdx.x] = final_merge(sums[0][0], 192 - STRIPE - 11,
                                              ~(text.size * PRIME64_2));
    if (lane == 1)
        digests[2 * blockIdx.x + 1] = final_merge(sums[0][0], 11, text.size * PRIME64_1);
}
