/* What the levels do in ways of their own. Differences are of two bytes, modulo 2^16; the magnitude
   of -32768 is 32768. A mask has the first element in its lowest bit. */

#define LOAD256(at) _mm256_loadu_si256((const __m256i *)(at))
#define LOAD512(at) _mm512_loadu_si512(at)

#if LEVEL == AVX2

/* The mask of 32 words that are all ones or zeros. */
FUNCTION u64 NAME(mask_words)(__m256i first, __m256i second)
{
    const __m256i bytes = _mm256_packs_epi16(first, second);
    return (u32)_mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, 0xd8));
}

/* All ones where a word exceeds the limit, without signs. */
FUNCTION __m256i NAME(above)(__m256i words, int limit)
{
    const __m256i least = _mm256_set1_epi16((short)(limit + 1));
    return _mm256_cmpeq_epi16(_mm256_max_epu16(words, least), words);
}

#endif

/* The lowest bit that is set; anything where none is. */
FUNCTION i64 NAME(lowest)(u64 mask)
{
#if LEVEL == GENERIC
    return __builtin_ctzll(mask | (u64)1 << 63);
#else
    return (i64)_tzcnt_u64(mask);
#endif
}

/* Which of 64 elements differ. */
FUNCTION u64 NAME(differ)(const u8 *base, const u8 *new, i64 width)
{
    u64 mask = 0;
#if LEVEL == AVX512
    if (width == 1)
        return _mm512_cmpneq_epi8_mask(LOAD512(base), LOAD512(new));
    if (width == 2) {
        const u64 low = _mm512_cmpneq_epi16_mask(LOAD512(base), LOAD512(new));
        return (u64)_mm512_cmpneq_epi16_mask(LOAD512(base + 64), LOAD512(new + 64)) << 32 | low;
    }
    for (int at = 0; at < width; at++) {
        const __m512i before = LOAD512(base + 64 * at), after = LOAD512(new + 64 * at);
        mask |= width == 4 ? (u64)_mm512_cmpneq_epi32_mask(before, after) << 16 * at
                           : (u64)_mm512_cmpneq_epi64_mask(before, after) << 8 * at;
    }
    return mask;
#elif LEVEL == AVX2
    for (int at = 0; at < 2 * width; at += 2) {
        const u8 *left = base + 32 * at, *right = new + 32 * at;
        const __m256i b0 = LOAD256(left), b1 = LOAD256(left + 32);
        const __m256i n0 = LOAD256(right), n1 = LOAD256(right + 32);
        if (width == 1) {
            mask = (u32)_mm256_movemask_epi8(_mm256_cmpeq_epi8(b1, n1));
            mask = mask << 32 | (u32)_mm256_movemask_epi8(_mm256_cmpeq_epi8(b0, n0));
        } else if (width == 2) {
            const __m256i same0 = _mm256_cmpeq_epi16(b0, n0), same1 = _mm256_cmpeq_epi16(b1, n1);
            mask |= NAME(mask_words)(same0, same1) << 16 * at;
        } else if (width == 4) {
            const __m256 same0 = _mm256_castsi256_ps(_mm256_cmpeq_epi32(b0, n0));
            const __m256 same1 = _mm256_castsi256_ps(_mm256_cmpeq_epi32(b1, n1));
            const u64 bits = (u64)_mm256_movemask_ps(same1) << 8 | (u64)_mm256_movemask_ps(same0);
            mask |= bits << 8 * at;
        } else {
            const __m256d same0 = _mm256_castsi256_pd(_mm256_cmpeq_epi64(b0, n0));
            const __m256d same1 = _mm256_castsi256_pd(_mm256_cmpeq_epi64(b1, n1));
            const u64 bits = (u64)_mm256_movemask_pd(same1) << 4 | (u64)_mm256_movemask_pd(same0);
            mask |= bits << 4 * at;
        }
    }
    return ~mask;
#else
    /* Eight bytes at a time: the highest bit of each element is set if any is, and a multiplication
       brings these bits together. */
    for (int at = 0; at < 8 * width; at++) {
        const u64 x = load64(base + 8 * at) ^ load64(new + 8 * at);
        if (width == 1) {
            const u64 rest = 0x7f7f7f7f7f7f7f7f, some = ((x & rest) + rest) | x;
            mask |= ((some & ~rest) >> 7) * 0x0102040810204080 >> 56 << 8 * at;
        } else if (width == 2) {
            const u64 rest = 0x7fff7fff7fff7fff, some = ((x & rest) + rest) | x;
            mask |= ((some & ~rest) >> 15) * 0x0001000200040008 >> 48 << 4 * at;
        } else if (width == 4) {
            mask |= ((u64)((u32)x != 0) | (u64)(x >> 32 != 0) << 1) << 2 * at;
        } else {
            mask |= (u64)(x != 0) << at;
        }
    }
    return mask;
#endif
}

/* Writes a mask for each 64 elements. A loop of nothing else reads as fast as memory gives. */
FUNCTION void NAME(mark)(const u8 *base, const u8 *new, i64 groups, i64 width, u64 *masks)
{
    FOR_WIDTH(width, for (i64 at = 0; at < groups; at++) {
        const i64 offset = GROUP * WIDTH * at;
        masks[at] = NAME(differ)(base + offset, new + offset, WIDTH);
    })
}

/* Of 64 differences: which are negative, which exceed 1 in magnitude, and which 256. */
typedef struct {
    u64 negative, large, wide;
} NAME(Kinds);

FUNCTION NAME(Kinds) NAME(kinds)(const u8 *values)
{
    NAME(Kinds) found = {0, 0, 0};
#if LEVEL == AVX512
    for (int half = 0; half < 2; half++) {
        const __m512i value = LOAD512(values + 64 * half), magnitude = _mm512_abs_epi16(value);
        const __m512i one = _mm512_set1_epi16(1), byte = _mm512_set1_epi16(256);
        found.negative |= (u64)_mm512_movepi16_mask(value) << 32 * half;
        found.large |= (u64)_mm512_cmpgt_epu16_mask(magnitude, one) << 32 * half;
        found.wide |= (u64)_mm512_cmpgt_epu16_mask(magnitude, byte) << 32 * half;
    }
#elif LEVEL == AVX2
    for (int half = 0; half < 2; half++) {
        const __m256i v0 = LOAD256(values + 64 * half), v1 = LOAD256(values + 64 * half + 32);
        const __m256i m0 = _mm256_abs_epi16(v0), m1 = _mm256_abs_epi16(v1);
        const __m256i n0 = _mm256_srai_epi16(v0, 15), n1 = _mm256_srai_epi16(v1, 15);
        found.negative |= NAME(mask_words)(n0, n1) << 32 * half;
        found.large |= NAME(mask_words)(NAME(above)(m0, 1), NAME(above)(m1, 1)) << 32 * half;
        found.wide |= NAME(mask_words)(NAME(above)(m0, 256), NAME(above)(m1, 256)) << 32 * half;
    }
#else
    for (int at = 0; at < GROUP; at++) {
        const u16 value = load16(values + 2 * at);
        const u32 magnitude = magnitude_of(value);
        found.negative |= (u64)(value >> 15) << at;
        found.large |= (u64)(magnitude > 1) << at;
        found.wide |= (u64)(magnitude > 256) << at;
    }
#endif
    return found;
}

/* Writes 64 differences: -1 where a bit is set, else 1. */
FUNCTION void NAME(spread_signs)(u64 signs, u8 *out)
{
#if LEVEL == AVX512
    for (int half = 0; half < 2; half++) {
        const __m512i minus = _mm512_movm_epi16((__mmask32)(signs >> 32 * half));
        _mm512_storeu_si512(out + 64 * half, _mm512_or_si512(minus, _mm512_set1_epi16(1)));
    }
#elif LEVEL == AVX2
    const __m256i bits = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096,
                                           8192, 16384, (short)32768);
    for (int part = 0; part < 4; part++) {
        const __m256i all = _mm256_set1_epi16((short)(signs >> 16 * part));
        const __m256i minus = _mm256_cmpeq_epi16(_mm256_and_si256(all, bits), bits);
        const __m256i value = _mm256_or_si256(minus, _mm256_set1_epi16(1));
        _mm256_storeu_si256((__m256i *)(out + 32 * part), value);
    }
#else
    for (int at = 0; at < GROUP; at++)
        store16(out + 2 * at, 1 - 2 * (signs >> at & 1));
#endif
}

/* Writes 32 gaps between 33 ascending places as bytes; returns whether all are below 255. */
FUNCTION int NAME(gaps_fit)(const u16 *places, u8 *out)
{
#if LEVEL == AVX512
    const __m512i apart = _mm512_sub_epi16(LOAD512(places + 1), LOAD512(places));
    const __m512i gaps = _mm512_sub_epi16(apart, _mm512_set1_epi16(1));
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi16_epi8(gaps));
    return !_mm512_cmpgt_epu16_mask(gaps, _mm512_set1_epi16(254));
#elif LEVEL == AVX2
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i apart0 = _mm256_sub_epi16(LOAD256(places + 1), LOAD256(places));
    const __m256i apart1 = _mm256_sub_epi16(LOAD256(places + 17), LOAD256(places + 16));
    const __m256i gaps0 = _mm256_sub_epi16(apart0, one), gaps1 = _mm256_sub_epi16(apart1, one);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(gaps0, gaps1), 0xd8);
    _mm256_storeu_si256((__m256i *)out, bytes);
    const __m256i beyond = NAME(above)(_mm256_max_epu16(gaps0, gaps1), 254);
    return _mm256_testz_si256(beyond, beyond);
#else
    u32 most = 0;
    for (int at = 0; at < 32; at++) {
        const u32 gap = (u32)places[at + 1] - places[at] - 1;
        out[at] = (u8)gap;
        most = gap > most ? gap : most;
    }
    return most < 255;
#endif
}

#if LEVEL == AVX512

/* Writes the places of bits that are set, the first of which is `first`; 128 bytes, whatever is. */
FUNCTION void NAME(pack_places)(u64 mask, i64 first, u16 *places)
{
    const __m512i lanes = _mm512_set_epi8(
        63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48, 47, 46, 45, 44, 43, 42, 41,
        40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18,
        17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i packed = _mm512_maskz_compress_epi8(mask, lanes);
    const __m512i begin = _mm512_set1_epi16((short)first);
    const __m512i low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(packed));
    const __m512i high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(packed, 1));
    _mm512_storeu_si512(places, _mm512_add_epi16(low, begin));
    _mm512_storeu_si512(places + 32, _mm512_add_epi16(high, begin));
}

/* Writes differences, and if `placed` places, of those of 32 elements that differ; returns which do.
   Writes 64 bytes to each, whatever differs. */
FUNCTION u32 NAME(pack_changes)(const u8 *base, const u8 *new, i64 place, int placed, u16 *places,
                                u8 *deltas)
{
    const __m512i lanes = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18,
                                           17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2,
                                           1, 0);
    const __m512i before = LOAD512(base), after = LOAD512(new);
    const __mmask32 differs = _mm512_cmpneq_epi16_mask(before, after);
    const __m512i delta = _mm512_sub_epi16(after, before);
    /* Packed in a register: to memory that instruction is slow on some processors. */
    _mm512_storeu_si512(deltas, _mm512_maskz_compress_epi16(differs, delta));
    if (placed) {
        const __m512i where = _mm512_add_epi16(_mm512_set1_epi16((short)place), lanes);
        _mm512_storeu_si512(places, _mm512_maskz_compress_epi16(differs, where));
    }
    return differs;
}

/* Writes magnitudes less 2, at most 255, of those of 64 differences that are large; 64 bytes,
   whatever is. */
FUNCTION void NAME(pack_magnitudes)(const u8 *values, u64 large, u8 *out)
{
    __m256i bytes[2];
    for (int half = 0; half < 2; half++) {
        const __m512i magnitude = _mm512_abs_epi16(LOAD512(values + 64 * half));
        const __m512i rest = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(2));
        bytes[half] = _mm512_cvtusepi16_epi8(rest);
    }
    const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(bytes[0]), bytes[1], 1);
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(large, all));
}

/* Writes the 32-bit positions that 16 entries of GAP8 mark behind the position `before`; 64 bytes,
   whatever is marked. Returns how many are; `far` becomes how far the last entry lies behind. */
FUNCTION i64 NAME(spread_gaps)(const u8 *entries, i64 before, u8 *out, i64 *far)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)entries);
    OWN_VECTOR(bytes);
    const __mmask16 marks = _mm_cmpneq_epi8_mask(bytes, _mm_set1_epi8((char)255));
    const __m512i none = _mm512_setzero_si512(), gaps = _mm512_cvtepu8_epi32(bytes);
    __m512i sums = _mm512_mask_add_epi32(gaps, marks, gaps, _mm512_set1_epi32(1));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, none, 15));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, none, 14));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, none, 12));
    sums = _mm512_add_epi32(sums, _mm512_alignr_epi32(sums, none, 8));
    const __m512i reached = _mm512_add_epi32(sums, _mm512_set1_epi32((int)before));
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(marks, reached));
    *far = _mm_extract_epi32(_mm512_extracti32x4_epi32(sums, 3), 3);
    return count_ones(marks);
}

#elif LEVEL == AVX2

/* Writes the differences of those of 8 elements whose bit is set; 16 bytes, whatever is. */
FUNCTION void NAME(shuffle_changes)(const u8 *base, const u8 *new, u64 mask, u8 *deltas)
{
    const __m128i before = _mm_loadu_si128((const __m128i *)base);
    const __m128i after = _mm_loadu_si128((const __m128i *)new);
    const __m128i order = _mm_loadu_si128((const __m128i *)orders[mask]);
    const __m128i packed = _mm_shuffle_epi8(_mm_sub_epi16(after, before), order);
    _mm_storeu_si128((__m128i *)deltas, packed);
}

/* Writes the places of bits that are set, the first of which is `place`; 16 bytes. */
FUNCTION void NAME(shuffle_places)(i64 place, u64 mask, u16 *places)
{
    const __m128i rank = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)ranks[mask]));
    const __m128i where = _mm_add_epi16(rank, _mm_set1_epi16((short)place));
    _mm_storeu_si128((__m128i *)places, where);
}

/* Writes magnitudes less 2, at most 255, of those of 8 differences whose bit is set; 8 bytes. */
FUNCTION void NAME(shuffle_magnitudes)(const u8 *values, u64 mask, u8 *out)
{
    const __m128i magnitude = _mm_abs_epi16(_mm_loadu_si128((const __m128i *)values));
    const __m128i rest = _mm_sub_epi16(magnitude, _mm_set1_epi16(2));
    const __m128i clipped = _mm_min_epu16(rest, _mm_set1_epi16(255));
    const __m128i order = _mm_loadl_epi64((const __m128i *)ranks[mask]);
    const __m128i bytes = _mm_shuffle_epi8(_mm_packus_epi16(clipped, clipped), order);
    _mm_storel_epi64((__m128i *)out, bytes);
}

#endif
