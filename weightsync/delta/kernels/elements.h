/* Single elements of tensors in memory: which ones differ, writing some, and looking at them. What
   lies outside is counted and never touched. */

/* The positions and the values of what differs in a block whose masks are made. */
FUNCTION i64 NAME(collect)(const u64 *masks, i64 groups, i64 begin, i64 width, const u8 *new,
                           u8 *index, u8 *value)
{
    i64 count = 0;
    for (i64 at = 0; at < groups; at++) {
        for (u64 mask = masks[at]; mask; mask &= mask - 1) {
            const i64 place = begin + GROUP * at + first_one(mask);
            store32(index + 4 * count, (u64)place);
            store(value + width * count, width, load(new + width * place, width));
            count++;
        }
    }
    return count;
}

/* Writes 32-bit positions and new values of what differs, with room for all of fewer than 2^31
   elements; returns how many do. */
KERNEL i64 NAME(find_elements)(const u8 *base, const u8 *new, i64 elements, i64 width, u8 *index,
                               u8 *value)
{
    u64 masks[2 * BLOCK / GROUP];
    const i64 whole = elements / GROUP * GROUP;
    i64 count = 0;
    for (i64 begin = 0; begin < whole; begin += 2 * BLOCK) {
        const i64 groups = smaller(2 * BLOCK, whole - begin) / GROUP;
        NAME(mark)(base + width * begin, new + width * begin, groups, width, masks);
        FOR_WIDTH(width, count += NAME(collect)(masks, groups, begin, WIDTH, new, index + 4 * count,
                                                value + WIDTH * count))
    }
    for (i64 place = whole; place < elements; place++) {
        const u64 after = load(new + width * place, width);
        if (load(base + width * place, width) != after) {
            store32(index + 4 * count, (u64)place);
            store(value + width * count, width, after);
            count++;
        }
    }
    return count;
}

FUNCTION i64 NAME(put_all)(u8 *target, i64 elements, const u8 *index, i64 size, i64 changed,
                           i64 width, const u8 *value)
{
    i64 wrong = 0;
#pragma GCC unroll 4
    for (i64 at = 0; at < changed; at++) {
        FETCH_AHEAD(target, width);
        const u64 place = (u64)load_place(index, at, size);
        if (place < (u64)elements)
            store(target + width * place, width, load(value + width * at, width));
        else
            wrong++;
    }
    return wrong;
}

/* Writes values to a tensor; returns how many positions lie outside. */
KERNEL i64 NAME(put_elements)(u8 *target, i64 elements, const u8 *index, i64 size, i64 changed,
                              i64 width, const u8 *value)
{
    if (size == 4)
        FOR_WIDTH(width, return NAME(put_all)(target, elements, index, 4, changed, WIDTH, value))
    else
        FOR_WIDTH(width, return NAME(put_all)(target, elements, index, 8, changed, WIDTH, value))
    return changed;
}

FUNCTION i64 NAME(compare_all)(const u8 *target, i64 elements, const u8 *index, i64 size,
                               i64 changed, i64 width, const u8 *value)
{
    i64 wrong = 0;
#pragma GCC unroll 4
    for (i64 at = 0; at < changed; at++) {
        FETCH_AHEAD(target, width);
        const u64 place = (u64)load_place(index, at, size);
        wrong += place >= (u64)elements ||
                 load(target + width * place, width) != load(value + width * at, width);
    }
    return wrong;
}

/* Returns how many elements of a tensor are other than the values, or outside. */
KERNEL i64 NAME(compare_elements)(const u8 *target, i64 elements, const u8 *index, i64 size,
                                  i64 changed, i64 width, const u8 *value)
{
    if (size == 4)
        FOR_WIDTH(width,
                  return NAME(compare_all)(target, elements, index, 4, changed, WIDTH, value))
    else
        FOR_WIDTH(width,
                  return NAME(compare_all)(target, elements, index, 8, changed, WIDTH, value))
    return changed;
}
