// Strided copies as lists of contiguous pieces, for copy engines. Pure: numbers of the items must
// be readable here, memory is not touched.

#pragma once

#include <cstdint>
#include <vector>

#include "strided_copy.h"

namespace maru {

// One contiguous piece; never empty.
struct CopyEntry {
    uint8_t* destination;
    const uint8_t* source;
    int64_t bytes;
};

// Every byte of the copies once, in the copies' order; neighbours that continue each other on both
// sides are one entry.
std::vector<CopyEntry> contiguous_entries(const std::vector<StridedCopy>& copies);

// Equal rows at equal distances: `rows` times `row`, each a pitch further on either side.
struct CopyRectangle {
    CopyEntry row;
    int64_t rows;
    int64_t destination_pitch; // bytes; at least the row's, as is the other; 0 where rows is 1
    int64_t source_pitch;
};

// The most that a CUDA device takes as the pitch of a rectangle (cudaDeviceProp::memPitch).
inline constexpr int64_t kMaxPitch = 2147483647;

// The same bytes in fewer calls: entries that follow each other at equal distances.
std::vector<CopyRectangle> rectangles_of(const std::vector<CopyEntry>& entries);

} // namespace maru
