/* The loops of deltas, and the copy that digests: each compiled for three levels of processors.

   Every function takes addresses and counts, and returns a count, or 0 and 1 for right and wrong.
   `native.py` calls them by name and level, such as read_gaps_avx2. Nothing here allocates, keeps
   state between calls (but two constant tables) or calls back.

   level.h holds the loops and is included once per level; what differs between levels is in
   vectors.h. A function has its level as a target attribute, so one plain compiler command makes all
   of them, and a processor never meets an instruction that it lacks. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "streams and tensors are little-endian; without this library NumPy reads them"
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

#include "memory.h"

/* Elements of one mask, and of one block: both versions of two bytes fit into the first cache, and
   places into 16 bits. */
enum { GROUP = 64, BLOCK = 1 << 13 };

/* One thread's memory between the passes over a block. Vectors are written whole, so that every
   array has room behind its end. */
typedef struct {
    u64 masks[BLOCK / GROUP + 8];
    u16 places[BLOCK + 128];
    u8 values[8 * (BLOCK + GROUP) + 256];
    u8 tails[2][8 * GROUP];
} Scratch;

/* For each mask of 8 bits the places of its bits: in elements, and in bytes of two-byte elements. */
static u8 ranks[256][8];
static u8 orders[256][16];

__attribute__((constructor)) static void fill_tables(void)
{
    for (int mask = 0; mask < 256; mask++) {
        for (int bit = 0, at = 0; bit < 8; bit++) {
            if (mask >> bit & 1) {
                ranks[mask][at] = (u8)bit;
                orders[mask][2 * at] = (u8)(2 * bit);
                orders[mask][2 * at + 1] = (u8)(2 * bit + 1);
                at++;
            }
        }
    }
}

#define GENERIC 0
#define AVX2 1
#define AVX512 2

#define LEVEL GENERIC
#define NAME(name) name##_generic
#define TARGET
#include "level.h"
#undef LEVEL
#undef NAME
#undef TARGET

#if defined(__x86_64__)

#define LEVEL AVX2
#define NAME(name) name##_avx2
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#include "level.h"
#undef LEVEL
#undef NAME
#undef TARGET

#define LEVEL AVX512
#define NAME(name) name##_avx512
#define TARGET                                                                                     \
    __attribute__((target("avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2")))
#include "level.h"
#undef LEVEL
#undef NAME
#undef TARGET

/* Which registers the operating system keeps for a thread. */
static u64 kept_registers(void)
{
    u32 low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (u64)high << 32 | low;
}

#endif

/* The best level of this machine. Asked here and not of the compiler's helpers: not all compilers'
   helpers know the same features. */
EXPORT i64 best_level(void)
{
#if defined(__x86_64__)
    u32 a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return GENERIC;
    const u32 popcnt_osxsave_avx = 1u << 23 | 1u << 27 | 1u << 28;
    if ((c & popcnt_osxsave_avx) != popcnt_osxsave_avx || (kept_registers() & 0x06) != 0x06)
        return GENERIC;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return GENERIC;
    const u32 seventh = b, vbmi2 = c >> 6 & 1;
    const u32 bmi_avx2_bmi2 = 1u << 3 | 1u << 5 | 1u << 8;
    if ((seventh & bmi_avx2_bmi2) != bmi_avx2_bmi2)
        return GENERIC;
    const u32 f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    if ((seventh & f_dq_bw_vl) != f_dq_bw_vl || !vbmi2 || (kept_registers() & 0xe6) != 0xe6)
        return AVX2;
    return AVX512;
#else
    return GENERIC;
#endif
}

/* Bytes of one thread's scratch memory, and of a text's digest under way. */
EXPORT i64 scratch_bytes(void)
{
    return (i64)sizeof(Scratch);
}

EXPORT i64 digest_bytes(void)
{
#if defined(__x86_64__)
    return (i64)sizeof(Digest);
#else
    return 0;
#endif
}
