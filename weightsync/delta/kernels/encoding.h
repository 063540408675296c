/* Makes streams. A tensor goes through in blocks that stay in the cache, and each block through
   simple passes: which elements differ, where and by how much (finding.h), and then plane by plane.
   The caller made room for all that is written. */

#ifndef ENCODING
#define ENCODING

enum { GAP16 = 1, GAP8 = 2, BITMAP = 3 };

/* How far a tensor has come, from one piece to the next. */
typedef struct {
    i64 distance; /* elements since the last change */
    i64 entries;  /* of gaps */
    i64 done;     /* values written */
    i64 pending;  /* values that wait for a whole group */
    i64 large;
    i64 wide;
    i64 before; /* changes in the block before */
} State;

/* Two of positions, then those of values: for SM signs, which are large, magnitudes of these less 2,
   and the wide ones' low and high bytes. */
typedef struct {
    u8 *positions[2];
    u8 *values[8];
} Planes;

#endif

/* Writes one gap of any length; returns the entries that it took. */
FUNCTION i64 NAME(gap8)(i64 gap, u8 *out)
{
    i64 entries = 1;
    for (; gap >= 255; gap -= 255, entries++)
        *out++ = 255;
    *out = (u8)gap;
    return entries;
}

/* Writes gaps between places; `distance` lies before the first. Returns the entries. */
FUNCTION i64 NAME(gaps8)(const u16 *places, i64 count, i64 distance, u8 *out)
{
    i64 entries = NAME(gap8)(distance + places[0], out), at = 1;
    while (at < count) {
        const i64 end = smaller(at + 32, count);
        if (end == at + 32 && NAME(gaps_fit)(places + at - 1, out + entries)) {
            entries += 32;
            at = end;
        }
        for (; at < end; at++)
            entries += NAME(gap8)((i64)places[at] - places[at - 1] - 1, out + entries);
    }
    return entries;
}

/* Writes gaps as two planes; only the first can be so long that it needs skips. */
FUNCTION i64 NAME(gaps16)(const u16 *places, i64 count, i64 distance, u8 *low, u8 *high)
{
    i64 gap = distance + places[0], entries = 0;
    for (; gap >= 65535; gap -= 65535, entries++)
        low[entries] = high[entries] = 255;
    for (i64 at = 0; at < count; at++, entries++) {
        if (at)
            gap = (i64)places[at] - places[at - 1] - 1;
        low[entries] = (u8)gap;
        high[entries] = (u8)(gap >> 8);
    }
    return entries;
}

/* Writes what is wide of 64 differences. */
FUNCTION void NAME(write_wide)(const u8 *values, u64 wide, u8 *low, u8 *high)
{
    for (; wide; wide &= wide - 1) {
        const u32 found = magnitude_of(load16(values + 2 * first_one(wide)));
        *low++ = (u8)found;
        *high++ = (u8)(found >> 8);
    }
}

/* Writes magnitudes of 64 differences that are large. */
FUNCTION void NAME(magnitudes)(const u8 *values, u64 large, u8 *out)
{
#if LEVEL == AVX512
    NAME(pack_magnitudes)(values, large, out);
#else
#if LEVEL == AVX2
    if (count_ones(large) > 5) {
        for (int at = 0; at < 8; at++) {
            const u64 byte = large >> 8 * at & 255;
            NAME(shuffle_magnitudes)(values + 16 * at, byte, out);
            out += count_ones(byte);
        }
        return;
    }
#endif
    for (; large; large &= large - 1) {
        const u32 rest = magnitude_of(load16(values + 2 * first_one(large))) - 2;
        *out++ = (u8)(rest < 255 ? rest : 255);
    }
#endif
}

/* Writes whole groups of differences; returns how many differences that were. */
FUNCTION i64 NAME(write_signed)(const u8 *values, i64 count, const Planes *planes, State *state)
{
    u8 *const *out = planes->values;
    i64 large = state->large, wide = state->wide;
    const i64 whole = count / GROUP * GROUP;
    for (i64 at = 0; at < whole; at += GROUP) {
        const u8 *group = values + 2 * at;
        const NAME(Kinds) kinds = NAME(kinds)(group);
        store64(out[0] + (state->done + at) / 8, kinds.negative);
        store64(out[1] + (state->done + at) / 8, kinds.large);
        NAME(magnitudes)(group, kinds.large, out[2] + large);
        NAME(write_wide)(group, kinds.wide, out[3] + wide, out[4] + wide);
        large += count_ones(kinds.large);
        wide += count_ones(kinds.wide);
    }
    state->done += whole;
    state->large = large;
    state->wide = wide;
    return whole;
}

/* Writes the bytes of each value, one plane per byte. */
FUNCTION void NAME(write_planar)(const u8 *values, i64 count, i64 width, const Planes *planes,
                                 State *state)
{
    for (i64 plane = 0; plane < width; plane++) {
        u8 *out = planes->values[plane] + state->done;
        const u8 *in = values + plane;
        FOR_WIDTH(width, for (i64 at = 0; at < count; at++) { out[at] = in[WIDTH * at]; })
    }
    state->done += count;
}

/* Writes the positions of a block that begins at element `begin` of the tensor. */
FUNCTION void NAME(write_positions)(i64 where, i64 begin, i64 elements, i64 count,
                                    const Planes *planes, State *state, const Scratch *scratch)
{
    const u16 *places = scratch->places;
    if (where == BITMAP) {
        memcpy(planes->positions[0] + begin / 8, scratch->masks, (size_t)((elements + 7) / 8));
        return;
    }
    if (!count) {
        state->distance += elements;
        return;
    }
    u8 *low = planes->positions[0] + state->entries;
    if (where == GAP8)
        state->entries += NAME(gaps8)(places, count, state->distance, low);
    else
        state->entries += NAME(gaps16)(places, count, state->distance, low,
                                       planes->positions[1] + state->entries);
    state->distance = elements - 1 - places[count - 1];
}

/* Writes the last differences, fewer than 64, with ones behind them. */
FUNCTION void NAME(finish)(u8 *values, const Planes *planes, State *state)
{
    const i64 done = state->done;
    for (i64 at = state->pending; at < GROUP; at++)
        store16(values + 2 * at, 1);
    NAME(write_signed)(values, GROUP, planes, state);
    state->done = done + state->pending;
}

/* Appends what differs in a piece of a tensor to its planes.

   begin: its first element in the tensor; a multiple of 64.
   elements: a multiple of 64 unless it is the last piece.
   where: code point of the positions.
   relative: 1 for SM, 0 for ABS.
   last: 1 for the last piece.
   scratch: with what the piece before left in it. */
KERNEL i64 NAME(encode_piece)(const u8 *base, const u8 *new, i64 begin, i64 elements, i64 width,
                              i64 where, i64 relative, i64 last, const Planes *planes, State *state,
                              Scratch *scratch)
{
    u8 *values = scratch->values;
    for (i64 at = 0; at < elements; at += BLOCK) {
        const i64 block = smaller(BLOCK, elements - at), size = relative ? 2 : width;
        const i64 found = NAME(find)(base + at * width, new + at * width, block, width,
                                     relative != 0, where != BITMAP, state->before, scratch,
                                     values + size * state->pending);
        state->before = found;
        NAME(write_positions)(where, begin + at, block, found, planes, state, scratch);
        if (relative) {
            const i64 all = state->pending + found;
            const i64 flushed = NAME(write_signed)(values, all, planes, state);
            state->pending = all - flushed;
            memmove(values, values + 2 * flushed, (size_t)(2 * state->pending));
        } else {
            NAME(write_planar)(values, found, width, planes, state);
        }
    }
    if (last && relative && state->pending)
        NAME(finish)(values, planes, state);
    return 0;
}

/* Returns how many elements differ in runs of at most BLOCK elements that begin every `stride`
   elements; the last may be shorter. */
KERNEL i64 NAME(count_changes)(const u8 *base, const u8 *new, i64 elements, i64 width, i64 run,
                               i64 stride, Scratch *scratch)
{
    i64 count = 0;
    for (i64 at = 0; at < elements; at += stride) {
        const i64 block = smaller(run, elements - at), groups = block / GROUP, left = block % GROUP;
        const u8 *here = base + at * width, *there = new + at * width;
        NAME(mark)(here, there, groups, width, scratch->masks);
        for (i64 group = 0; group < groups; group++)
            count += count_ones(scratch->masks[group]);
        const i64 end = GROUP * groups * width;
        if (left)
            count += count_ones(NAME(mark_tail)(here + end, there + end, left, width, scratch));
    }
    return count;
}

/* Returns how many gap entries of `width` bytes positions take that only rise; writes them if
   `written`. */
FUNCTION i64 NAME(entries_of)(const u8 *index, i64 size, i64 changed, i64 width, int written,
                              u8 *out)
{
    const i64 skip = width == 1 ? 255 : 65535;
    i64 count = 0, expected = 0;
    for (i64 at = 0; at < changed; at++) {
        const i64 place = load_place(index, at, size);
        i64 gap = place - expected;
        expected = place + 1;
        for (; gap >= skip; gap -= skip, count++)
            if (written)
                store(out + width * count, width, (u64)skip);
        if (written)
            store(out + width * count, width, (u64)gap);
        count++;
    }
    return count;
}

/* Of positions of 4 bytes or 8, entries of 1 or 2; see entries_of. Writes none if `out` is NULL. */
KERNEL i64 NAME(write_entries)(const u8 *index, i64 size, i64 changed, i64 width, u8 *out)
{
    if (size == 4 && width == 1)
        return out ? NAME(entries_of)(index, 4, changed, 1, 1, out)
                   : NAME(entries_of)(index, 4, changed, 1, 0, out);
    return out ? NAME(entries_of)(index, size, changed, width, 1, out)
               : NAME(entries_of)(index, size, changed, width, 0, out);
}
