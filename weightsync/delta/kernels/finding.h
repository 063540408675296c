/* Finds what differs in a block: which elements, where, and their values.

   Passes without branches on data beat one clever loop. Three ways lead to places and values:
   vectors that pack (AVX-512 VBMI2), shuffles of eight elements where many differ (AVX2), and bit by
   bit everywhere else. */

/* Changes in a block from which shuffles pay, and up to which most masks are empty. */
#ifndef FINDING
#define FINDING
enum { DENSE = BLOCK / 8, SPARSE = BLOCK / 256 };
#endif

/* Returns the mask of fewer than 64 elements, without a look behind them. */
FUNCTION u64 NAME(mark_tail)(const u8 *base, const u8 *new, i64 left, i64 width, Scratch *scratch)
{
    u64 mask = 0;
    memset(scratch->tails, 0, sizeof scratch->tails);
    memcpy(scratch->tails[0], base, (size_t)(left * width));
    memcpy(scratch->tails[1], new, (size_t)(left * width));
    NAME(mark)(scratch->tails[0], scratch->tails[1], 1, width, &mask);
    return mask;
}

/* Writes the places of bits that are set, and up to two more; returns how many there are. */
FUNCTION i64 NAME(places_of)(u64 mask, i64 first, u16 *places)
{
    const i64 count = count_ones(mask);
    i64 done = 0;
    do {
        /* Two at a time, needed or not, spare most of the guesses at how many there are. */
        places[done] = (u16)(first + NAME(lowest)(mask));
        mask &= mask - 1;
        places[done + 1] = (u16)(first + NAME(lowest)(mask));
        mask &= mask - 1;
        done += 2;
    } while (done < count);
    return count;
}

/* Writes the places of all bits that are set; returns how many there are. */
FUNCTION i64 NAME(flatten)(const u64 *masks, i64 groups, i64 before, u16 *places)
{
    i64 count = 0;
#if LEVEL == AVX512
    if (before > DENSE) {
        for (i64 at = 0; at < groups; at++) {
            NAME(pack_places)(masks[at], GROUP * at, places + count);
            count += count_ones(masks[at]);
        }
        return count;
    }
#endif
    if (before < SPARSE) {
        for (i64 at = 0; at < groups; at++)
            /* A guess that is mostly right where few masks hold any. */
            if (masks[at])
                count += NAME(places_of)(masks[at], GROUP * at, places + count);
        return count;
    }
    for (i64 at = 0; at < groups; at++)
        count += NAME(places_of)(masks[at], GROUP * at, places + count);
    return count;
}

/* Writes the values, or the differences of two bytes, at these places. */
FUNCTION void NAME(take)(const u8 *base, const u8 *new, const u16 *places, i64 count, i64 width,
                         int relative, u8 *values)
{
    if (relative) {
        for (i64 at = 0; at < count; at++) {
            const i64 place = 2 * places[at];
            store16(values + 2 * at, (u64)load16(new + place) - load16(base + place));
        }
        return;
    }
    FOR_WIDTH(width, for (i64 at = 0; at < count; at++) {
        store(values + WIDTH * at, WIDTH, load(new + WIDTH * places[at], WIDTH));
    })
}

#if LEVEL == AVX512

/* Does the work of mark, flatten and take for differences, with vectors that pack. Half a group at a
   time, so that little waits for where the packed ones begin. */
FUNCTION i64 NAME(pack)(const u8 *base, const u8 *new, i64 groups, int placed, Scratch *scratch,
                        u8 *values)
{
    i64 count = 0;
    for (i64 at = 0; at < groups; at++) {
        u64 mask = 0;
        /* Four packed vectors in a row take a sixth longer; GCC leaves the loop as it is at -O2. */
#if defined(__clang__)
#pragma clang loop unroll(disable)
#endif
        for (int half = 0; half < 2; half++) {
            const i64 place = GROUP * at + 32 * half;
            const u32 found = NAME(pack_changes)(base + 2 * place, new + 2 * place, place, placed,
                                                 scratch->places + count,
                                                 values + 2 * count);
            mask |= (u64)found << 32 * half;
            count += count_ones(found);
        }
        scratch->masks[at] = mask;
    }
    return count;
}

#elif LEVEL == AVX2

/* Writes places and differences of two bytes, eight elements at a time; returns their count. */
FUNCTION i64 NAME(shuffle)(const u8 *base, const u8 *new, i64 groups, Scratch *scratch, u8 *values)
{
    i64 count = 0;
    for (i64 at = 0; at < groups; at++) {
        const u64 mask = scratch->masks[at];
        for (int part = 0; part < 8; part++) {
            const u64 byte = mask >> 8 * part & 255;
            const i64 place = GROUP * at + 8 * part;
            NAME(shuffle_changes)(base + 2 * place, new + 2 * place, byte, values + 2 * count);
            NAME(shuffle_places)(place, byte, scratch->places + count);
            count += count_ones(byte);
        }
    }
    return count;
}

#endif

/* Writes masks, values and, if `placed`, places of a block; returns how many elements differ. `before`
   did in the block before, to choose the quicker way. */
FUNCTION i64 NAME(find)(const u8 *base, const u8 *new, i64 elements, i64 width, int relative,
                        int placed, i64 before, Scratch *scratch, u8 *values)
{
    const i64 groups = elements / GROUP, left = elements % GROUP;
    i64 count = 0;
    (void)placed;
#if LEVEL == AVX512
    if (relative && before >= SPARSE)
        count = NAME(pack)(base, new, groups, placed, scratch, values);
    else
#endif
    {
        NAME(mark)(base, new, groups, width, scratch->masks);
#if LEVEL == AVX2
        if (relative && before > DENSE)
            count = NAME(shuffle)(base, new, groups, scratch, values);
        else
#endif
        {
            count = NAME(flatten)(scratch->masks, groups, before, scratch->places);
            NAME(take)(base, new, scratch->places, count, width, relative, values);
        }
    }
    if (left) {
        const i64 at = GROUP * groups * width;
        const u64 mask = NAME(mark_tail)(base + at, new + at, left, width, scratch);
        u16 *places = scratch->places + count;
        u8 *end = values + (relative ? 2 : width) * count;
        scratch->masks[groups] = mask;
        const i64 more = NAME(places_of)(mask, GROUP * groups, places);
        NAME(take)(base, new, places, more, width, relative, end);
        count += more;
    }
    return count;
}
