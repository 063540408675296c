/* Memory at any address, and small words. Nothing here checks bounds: the loops do. */

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* What was read from memory that somebody else may be writing is used, never read again: the
   compiler may not believe that the memory still holds it. */
#define OWN(value) __asm__("" : "+r"(value))
#define OWN_VECTOR(value) __asm__("" : "+v"(value))

/* Changes between the one that is touched and the one whose line is fetched. */
enum { AHEAD = 96 };

/* In a loop over changes: has the line of a later one fetched; behind the end that of the last one.
   Not into the first cache, nor for a write: far fewer lines can be on their way there at a time. Any
   address is harmless. */
#define FETCH_AHEAD(data, width)                                                                   \
    __builtin_prefetch(                                                                            \
        (data) + (width) * load_place(index, smaller(at + AHEAD, changed - 1), size), 0, 2)

INLINE u16 load16(const u8 *at)
{
    u16 value;
    memcpy(&value, at, sizeof value);
    return value;
}

INLINE u32 load32(const u8 *at)
{
    u32 value;
    memcpy(&value, at, sizeof value);
    return value;
}

INLINE u64 load64(const u8 *at)
{
    u64 value;
    memcpy(&value, at, sizeof value);
    return value;
}

INLINE void store16(u8 *at, u64 value)
{
    const u16 narrow = (u16)value;
    memcpy(at, &narrow, sizeof narrow);
}

INLINE void store32(u8 *at, u64 value)
{
    const u32 narrow = (u32)value;
    memcpy(at, &narrow, sizeof narrow);
}

INLINE void store64(u8 *at, u64 value)
{
    memcpy(at, &value, sizeof value);
}

/* An element of 1, 2, 4 or 8 bytes. */
INLINE u64 load(const u8 *at, i64 width)
{
    switch (width) {
    case 1: return *at;
    case 2: return load16(at);
    case 4: return load32(at);
    default: return load64(at);
    }
}

INLINE void store(u8 *at, i64 width, u64 value)
{
    switch (width) {
    case 1: *at = (u8)value; break;
    case 2: store16(at, value); break;
    case 4: store32(at, value); break;
    default: store64(at, value); break;
    }
}

/* A position of 4 bytes or 8: signed, as NumPy's. */
INLINE i64 load_place(const u8 *index, i64 at, i64 size)
{
    return size == 4 ? (i64)(int32_t)load32(index + 4 * at) : (i64)load64(index + 8 * at);
}

INLINE i64 smaller(i64 left, i64 right)
{
    return left < right ? left : right;
}

/* The magnitude of a difference, without a guess at its sign; that of -32768 is 32768. */
INLINE u32 magnitude_of(u16 difference)
{
    const u32 sign = 0 - (u32)(difference >> 15);
    return (u16)((difference ^ sign) - sign);
}

INLINE i64 count_ones(u64 mask)
{
    return __builtin_popcountll(mask);
}

/* The lowest bit that is set, of a mask that has one. */
INLINE i64 first_one(u64 mask)
{
    return __builtin_ctzll(mask);
}

/* Runs a statement with WIDTH, or SIZE, a constant, so that a loop in it branches on neither. */
#define FOR_WIDTH(width, call)                                                                     \
    switch (width) {                                                                               \
    case 1: { enum { WIDTH = 1 }; call; break; }                                                   \
    case 2: { enum { WIDTH = 2 }; call; break; }                                                   \
    case 4: { enum { WIDTH = 4 }; call; break; }                                                   \
    default: { enum { WIDTH = 8 }; call; break; }                                                  \
    }
