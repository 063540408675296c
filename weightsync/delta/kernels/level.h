/* All loops of one level: LEVEL, NAME and TARGET are those of kernels.c. */

#define FUNCTION TARGET static inline __attribute__((always_inline))
#define KERNEL EXPORT TARGET

#include "vectors.h"

#include "finding.h"

#include "encoding.h"

#include "decoding.h"

#include "elements.h"

#include "rows.h"

#if LEVEL != GENERIC
#include "copying.h"
#endif

#undef FUNCTION
#undef KERNEL
