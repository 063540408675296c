/* A copy that digests what it copies: one pass over the source, and stores past the caches.

   A store that goes through a cache first reads what it will overwrite, and drives out what others
   work with. Memory of a push is read next by another process, when a shard of it is whole; few
   caches keep it for so long.

   The digest is XXH3 of 128 bits for more than 240 bytes, with seed 0 and the default secret, from
   the specification in the repository of xxHash, doc/xxhash_spec.md, whose names these are. The
   library of that name cannot write what it reads. */

#ifndef COPYING
#define COPYING

/* Bytes. Only whole lines of a cache are written past it without being read. */
enum { STRIPE = 64, CHUNK = 1024, LINE = 64 };

static const u8 secret[192] = {
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

/* A text that is being digested. */
typedef struct {
    u64 accumulators[8];
    u8 rest[STRIPE + CHUNK]; /* the 64 bytes before what comes next, then what is no whole chunk */
} Digest;

static const u64 initial[8] = {
    0x00000000c2b2ae3d, 0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9,
    0x85ebca77c2b2ae63, 0x0000000085ebca77, 0x27d4eb2f165667c5, 0x000000009e3779b1,
};

/* A product of 128 bits, its halves combined. */
INLINE u64 folded(u64 left, u64 right)
{
    const unsigned __int128 product = (unsigned __int128)left * right;
    return (u64)product ^ (u64)(product >> 64);
}

/* One half of the digest. */
INLINE u64 merged(const u64 *accumulators, const u8 *key, u64 result)
{
    for (int lane = 0; lane < 8; lane += 2)
        result += folded(accumulators[lane] ^ load64(key + 8 * lane),
                         accumulators[lane + 1] ^ load64(key + 8 * lane + 8));
    result = (result ^ result >> 37) * 0x165667919e3779f9;
    return result ^ result >> 32;
}

#endif

/* The eight accumulators of 64 bits, in registers. */
typedef struct {
#if LEVEL == AVX512
    __m512i part[1];
#else
    __m256i part[2];
#endif
} NAME(Accumulators);

/* Takes a stripe, with the secret that is its own. */
FUNCTION void NAME(take_stripe)(NAME(Accumulators) * all, const u8 *stripe, const u8 *key)
{
#if LEVEL == AVX512
    const __m512i data = LOAD512(stripe), keyed = _mm512_xor_si512(data, LOAD512(key));
    const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    const __m512i swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
    all->part[0] = _mm512_add_epi64(all->part[0], _mm512_add_epi64(swapped, product));
#else
    for (int at = 0; at < 2; at++) {
        const __m256i data = LOAD256(stripe + 32 * at);
        const __m256i keyed = _mm256_xor_si256(data, LOAD256(key + 32 * at));
        const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        const __m256i swapped = _mm256_shuffle_epi32(data, 0x4e);
        all->part[at] = _mm256_add_epi64(all->part[at], _mm256_add_epi64(swapped, product));
    }
#endif
}

/* Mixes the accumulators after the stripes of a whole chunk. */
FUNCTION void NAME(scramble)(NAME(Accumulators) * all)
{
    const u8 *key = secret + sizeof secret - STRIPE;
#if LEVEL == AVX512
    const __m512i acc = all->part[0], prime = _mm512_set1_epi64(0x9e3779b1);
    const __m512i mixed = _mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47));
    all->part[0] = _mm512_mullo_epi64(_mm512_xor_si512(mixed, LOAD512(key)), prime);
#else
    for (int at = 0; at < 2; at++) {
        const __m256i acc = all->part[at], prime = _mm256_set1_epi64x(0x9e3779b1);
        __m256i mixed = _mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47));
        mixed = _mm256_xor_si256(mixed, LOAD256(key + 32 * at));
        const __m256i low = _mm256_mul_epu32(mixed, prime);
        const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
        all->part[at] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    }
#endif
}

/* Writes a chunk past the caches; the target begins a line. */
FUNCTION void NAME(stream)(u8 *target, const u8 *source)
{
#if LEVEL == AVX512
    for (int at = 0; at < CHUNK; at += 64)
        _mm512_stream_si512((void *)(target + at), LOAD512(source + at));
#else
    for (int at = 0; at < CHUNK; at += 32)
        _mm256_stream_si256((__m256i *)(target + at), LOAD256(source + at));
#endif
}

/* Copies and digests at least one chunk. */
FUNCTION void NAME(copy_chunks)(u64 *accumulators, const u8 *source, u8 *target, i64 chunks)
{
    const i64 lead = -(uintptr_t)target % LINE, last = CHUNK * (chunks - 1);
    NAME(Accumulators) all;
    memcpy(&all, accumulators, sizeof all);
    for (i64 at = 0; at <= last; at += CHUNK) {
        for (int stripe = 0; stripe < CHUNK / STRIPE; stripe++)
            NAME(take_stripe)(&all, source + at + STRIPE * stripe, secret + 8 * stripe);
        NAME(scramble)(&all);
        /* Of both sides the same bytes: those that lie behind the first line's beginning. */
        if (at < last)
            NAME(stream)(target + lead + at, source + lead + at);
    }
    memcpy(accumulators, &all, sizeof all);
    memcpy(target, source, LINE);
    memcpy(target + last, source + last, CHUNK);
    /* No later store is seen before those that went past the caches. */
    _mm_sfence();
}

/* Copies and digests the next piece of a text: a multiple of CHUNK, unless it is the last. */
KERNEL i64 NAME(copy_piece)(Digest *digest, const u8 *source, u8 *target, i64 size, i64 first,
                            i64 last)
{
    if (first)
        memcpy(digest->accumulators, initial, sizeof initial);
    /* The last chunk is digested in another way, also when it is a whole one. */
    const i64 chunks = (last ? size - 1 : size) / CHUNK, whole = CHUNK * chunks;
    if (chunks) {
        NAME(copy_chunks)(digest->accumulators, source, target, chunks);
        memcpy(digest->rest, source + whole - STRIPE, STRIPE);
    }
    memcpy(digest->rest + STRIPE, source + whole, (size_t)(size - whole));
    memcpy(target + whole, source + whole, (size_t)(size - whole));
    return 0;
}

/* Writes the digest of `size` bytes, the last piece of which was copied: high bytes first. */
KERNEL i64 NAME(finish_digest)(const Digest *digest, i64 size, u64 *out)
{
    const i64 length = (size - 1) % CHUNK + 1;
    u64 ends[8];
    NAME(Accumulators) all;
    memcpy(&all, digest->accumulators, sizeof all);
    for (i64 at = 0; at < (length - 1) / STRIPE; at++)
        NAME(take_stripe)(&all, digest->rest + STRIPE * (at + 1), secret + 8 * at);
    /* The last 64 bytes of all, of which some may have been in the stripe before. */
    NAME(take_stripe)(&all, digest->rest + length, secret + sizeof secret - STRIPE - 7);
    memcpy(ends, &all, sizeof all);
    const u64 low = (u64)size * 0x9e3779b185ebca87, high = ~((u64)size * 0xc2b2ae3d27d4eb4f);
    out[0] = __builtin_bswap64(merged(ends, secret + sizeof secret - STRIPE - 11, high));
    out[1] = __builtin_bswap64(merged(ends, secret + 11, low));
    return 0;
}
