/* Copies of many views at once: a call for each costs as much as a few kilobytes. */

#ifndef ROWS
#define ROWS

/* As many rows of as many bytes on both sides, each so far from the one before. */
typedef struct {
    i64 target;
    i64 source;
    i64 count;
    i64 bytes;
    i64 target_pitch;
    i64 source_pitch;
} Rows;

#endif

/* Makes the copies of a table, in its order. */
KERNEL i64 NAME(copy_rows)(const Rows *table, i64 length)
{
    for (i64 at = 0; at < length; at++) {
        const Rows rows = table[at];
        for (i64 row = 0; row < rows.count; row++)
            memcpy((u8 *)rows.target + row * rows.target_pitch,
                   (const u8 *)rows.source + row * rows.source_pitch, (size_t)rows.bytes);
    }
    return 0;
}
