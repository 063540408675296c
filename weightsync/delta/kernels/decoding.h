/* Reads streams and patches tensors. Returns 0, or 1 for what is wrong.

   Streams are hostile, and their sender may share their memory: each loop proves what it needs as it
   goes, of the very bytes that it uses (OWN). */

FUNCTION void NAME(put_place)(u8 *index, i64 at, i64 size, i64 place)
{
    if (size == 4)
        store32(index + 4 * at, (u64)place);
    else
        store64(index + 8 * at, (u64)place);
}

FUNCTION u64 NAME(own_byte)(const u8 *at)
{
    u64 value = *at;
    OWN(value);
    return value;
}

FUNCTION u64 NAME(own_bits)(const u8 *at, i64 bytes)
{
    u64 value = 0;
    if (bytes >= 8)
        value = load64(at);
    else
        for (i64 byte = 0; byte < bytes; byte++)
            value |= (u64)at[byte] << 8 * byte;
    OWN(value);
    return value;
}

FUNCTION i64 NAME(read_entries)(const u8 *low, const u8 *high, i64 entries, i64 elements, u8 *index,
                                i64 size, i64 changed)
{
    const i64 skip = high ? 65535 : 255;
    i64 at = 0, filled = 0, position = -1, marks = 0;
#if LEVEL == AVX512
    /* As long as there is room for all of a vector. The last entry is left over. */
    if (size == 4 && !high) {
        for (; at + 16 < entries && filled + 16 <= changed; at += 16) {
            i64 far;
            filled += NAME(spread_gaps)(low + at, position, index + 4 * filled, &far);
            position += far;
        }
    }
#endif
    for (; at < entries; at++) {
        /* A skip writes too, and what it wrote is overwritten, so that there is no guess: behind
           the last mark there may be none. */
        if (filled == changed)
            return 1;
        i64 entry = high ? low[at] | high[at] << 8 : low[at];
        OWN(entry);
        marks = entry != skip;
        position += entry + marks;
        NAME(put_place)(index, filled, size, position);
        filled += marks;
    }
    return !(filled == changed && marks && position < elements);
}

/* Writes the positions that gap entries mark.

   low: the entries, or their low bytes.
   high: their high bytes; NULL where entries are bytes.
   index: room for `changed` positions of `size` bytes, 4 or 8. */
KERNEL i64 NAME(read_gaps)(const u8 *low, const u8 *high, i64 entries, i64 elements, u8 *index,
                           i64 size, i64 changed)
{
    if (high)
        return NAME(read_entries)(low, high, entries, elements, index, size, changed);
    if (size == 4)
        return NAME(read_entries)(low, NULL, entries, elements, index, 4, changed);
    return NAME(read_entries)(low, NULL, entries, elements, index, 8, changed);
}

FUNCTION i64 NAME(read_bits)(const u8 *plane, i64 elements, u8 *index, i64 size, i64 changed)
{
    const i64 bytes = (elements + 7) / 8;
    i64 filled = 0, place = -1;
    for (i64 at = 0; at < bytes; at += 8) {
        u64 mask = NAME(own_bits)(plane + at, bytes - at);
        if (count_ones(mask) > changed - filled)
            return 1;
        for (; mask; mask &= mask - 1) {
            place = 8 * at + first_one(mask);
            NAME(put_place)(index, filled++, size, place);
        }
    }
    return !(filled == changed && place < elements);
}

/* Writes the positions of bits that are set; see read_gaps. */
KERNEL i64 NAME(read_bitmap)(const u8 *plane, i64 elements, u8 *index, i64 size, i64 changed)
{
    if (size == 4)
        return NAME(read_bits)(plane, elements, index, 4, changed);
    return NAME(read_bits)(plane, elements, index, 8, changed);
}

/* Writes `changed` differences of two bytes.

   signs, larges: a bit for each difference.
   magnitudes: those of the `large` ones, less 2.
   low, high: bytes of the `wide` ones. */
KERNEL i64 NAME(read_signed)(const u8 *signs, const u8 *larges, const u8 *magnitudes, const u8 *low,
                             const u8 *high, i64 changed, i64 large, i64 wide, u8 *out)
{
    for (i64 at = 0; at < changed; at += GROUP) {
        const i64 left = smaller(changed - at, GROUP), bytes = (left + 7) / 8;
        const u64 sign = NAME(own_bits)(signs + at / 8, bytes);
        u64 mask = NAME(own_bits)(larges + at / 8, bytes);
        large -= count_ones(mask);
        /* No bit may be set behind the last difference. */
        if (large < 0 || (left < GROUP && (sign | mask) >> left))
            return 1;
        if (left == GROUP)
            NAME(spread_signs)(sign, out + 2 * at);
        else
            for (i64 each = 0; each < left; each++)
                store16(out + 2 * (at + each), 1 - 2 * (sign >> each & 1));
        for (; mask; mask &= mask - 1) {
            const i64 each = first_one(mask);
            u64 value = NAME(own_byte)(magnitudes++) + 2;
            if (value == 257) {
                if (--wide < 0)
                    return 1;
                value = NAME(own_byte)(low++) | NAME(own_byte)(high++) << 8;
                if (value < 257 || value > 32768)
                    return 1;
            }
            store16(out + 2 * (at + each), sign >> each & 1 ? 0 - value : value);
        }
    }
    return !(large == 0 && wide == 0);
}

FUNCTION i64 NAME(join_all)(const u8 *const *planes, i64 width, i64 changed, u8 *out)
{
    const u8 *in[8];
    memcpy(in, planes, (size_t)width * sizeof *in);
    for (i64 at = 0; at < changed; at++) {
        u64 word = 0;
        for (i64 plane = 0; plane < width; plane++)
            word |= (u64)in[plane][at] << 8 * plane;
        store(out + width * at, width, word);
    }
    return 0;
}

/* Writes words of which each plane holds one byte. */
KERNEL i64 NAME(join_planes)(const u8 *const *planes, i64 width, i64 changed, u8 *out)
{
    FOR_WIDTH(width, return NAME(join_all)(planes, WIDTH, changed, out))
    return 1;
}

FUNCTION i64 NAME(add_all)(const u8 *base, const u8 *index, i64 size, i64 changed, u8 *delta)
{
#pragma GCC unroll 4
    for (i64 at = 0; at < changed; at++) {
        FETCH_AHEAD(base, 2);
        const u64 before = load16(base + 2 * load_place(index, at, size));
        store16(delta + 2 * at, before + load16(delta + 2 * at));
    }
    return 0;
}

/* Turns differences of two bytes into values; every position was proved to be in the base. */
KERNEL i64 NAME(add_changes)(const u8 *base, const u8 *index, i64 size, i64 changed, u8 *delta)
{
    if (size == 4)
        return NAME(add_all)(base, index, 4, changed, delta);
    return NAME(add_all)(base, index, 8, changed, delta);
}

FUNCTION i64 NAME(shift_all)(u8 *target, const u8 *index, i64 size, i64 changed, u8 *delta, u8 *old)
{
#pragma GCC unroll 4
    for (i64 at = 0; at < changed; at++) {
        FETCH_AHEAD(target, 2);
        u8 *place = target + 2 * load_place(index, at, size);
        const u64 before = load16(place);
        store16(old + 2 * at, before);
        const u64 value = before + load16(delta + 2 * at);
        store16(delta + 2 * at, value);
        store16(place, value);
    }
    return 0;
}

/* Adds differences of two bytes to a tensor; `delta` becomes the values, `old` those before. */
KERNEL i64 NAME(shift_values)(u8 *target, const u8 *index, i64 size, i64 changed, u8 *delta, u8 *old)
{
    if (size == 4)
        return NAME(shift_all)(target, index, 4, changed, delta, old);
    return NAME(shift_all)(target, index, 8, changed, delta, old);
}

FUNCTION i64 NAME(scatter_all)(u8 *target, i64 elements, const u8 *index, i64 size, i64 changed,
                               i64 width, const u8 *value, u8 *old)
{
    u64 wrong = 0;
    for (i64 at = 0; at < changed; at++)
        wrong |= (u64)load_place(index, at, size) >= (u64)elements;
    if (wrong)
        return 1;
#pragma GCC unroll 4
    for (i64 at = 0; at < changed; at++) {
        FETCH_AHEAD(target, width);
        u8 *place = target + width * load_place(index, at, size);
        store(old + width * at, width, load(place, width));
        store(place, width, load(value + width * at, width));
    }
    return 0;
}

/* Writes values to a tensor, and what was there into `old`; nothing if one lies outside. */
KERNEL i64 NAME(scatter_values)(u8 *target, i64 elements, const u8 *index, i64 size, i64 changed,
                                i64 width, const u8 *value, u8 *old)
{
    if (size == 4)
        FOR_WIDTH(width, return NAME(scatter_all)(target, elements, index, 4, changed, WIDTH, value,
                                                  old))
    else
        FOR_WIDTH(width, return NAME(scatter_all)(target, elements, index, 8, changed, WIDTH, value,
                                                  old))
    return 1;
}
