// How a strided copy is spread over a kernel's blocks and threads. Pure arithmetic, for the host.
//
// A row is cut into pieces, so that few long rows fill a launch as well as many short ones. `lanes`
// neighbouring threads share a piece; pieces are numbered in the order of the rows, and the groups
// of lanes take them in turn until none is left, so any number of blocks does the whole copy.

#pragma once

#include <algorithm>
#include <cstdint>

#include "strided_copy.h"

namespace maru {

struct CopyLaunch {
    int blocks;  // 0: there is nothing to do, and nothing must be launched
    int threads; // of a block
    int lanes;   // threads that share a piece; divides `threads`
    int64_t piece_bytes;
    int64_t pieces_per_row;
    int64_t num_pieces;
};

inline constexpr int kThreads = 256;
inline constexpr int kMaxLanes = 32;
// Of 16 bytes, so that every piece of a row starts as aligned as the row does; long enough that
// finding a row (some ten 64-bit divisions) is small beside moving the piece.
inline constexpr int64_t kPieceBytes = 4096;
// What one lane moves in one round: 4 units of 16 bytes. See kUnitsInFlight.
inline constexpr int64_t kBytesPerLane = 64;
// One transaction of a warp: 8 lanes of 16 bytes read one whole line of it.
inline constexpr int64_t kLineBytes = 128;

// Where the objects lie.
enum class ObjectMemory {
    kHost,   // pinned host memory, read and written over the bus
    kDevice, // the device's own memory: a staging tensor there
};

// How many blocks a launch may have at most.
//
// A bus of 64 GB/s with 4 us from request to data (host memory behind a busy switch; DRAM takes 1
// to 2) is full with 256 KiB in flight; a block holds 256 threads x 64 bytes = 16 KiB. 32 blocks
// are twice that, and in another reading what a chip-to-chip link of 400 GB/s with 1.2 us takes.
// More blocks would move nothing faster, but hold SMs for as long as the slow memory takes, while
// the engine decodes: so never more than a quarter of them either. From device to device the limit
// is the memory's own bandwidth, some MiB in flight: two blocks on every SM, for a short time.
// Computed, not measured.
inline int max_blocks_of_a_launch(int multiprocessors, ObjectMemory objects) {
    if (objects == ObjectMemory::kDevice)
        return std::max(1, 2 * multiprocessors);
    return std::clamp(multiprocessors / 4, 1, 32);
}

// The smallest power of two that is not below `value`; `value` is 1 or more.
inline int64_t power_of_two_from(int64_t value) {
    int64_t power = 1;
    while (power < value)
        power *= 2;
    return power;
}

// `max_blocks`: see above; at least 1.
inline CopyLaunch choose_launch(const StridedCopy& copy, int max_blocks) {
    CopyLaunch launch{};
    const int64_t rows = copy.num_rows();
    if (rows == 0)
        return launch;
    launch.threads = kThreads;
    launch.piece_bytes = std::min(copy.row_bytes, kPieceBytes);
    launch.pieces_per_row = (copy.row_bytes - 1) / launch.piece_bytes + 1;
    launch.num_pieces = rows * launch.pieces_per_row;
    // Few lanes with several units each keep more in flight and find fewer rows than many lanes
    // with one, as long as they still read whole lines.
    const int64_t by_bytes = (launch.piece_bytes - 1) / kBytesPerLane + 1;
    const int64_t by_line = (std::min(launch.piece_bytes, kLineBytes) - 1) / 16 + 1;
    launch.lanes = static_cast<int>(
        std::min<int64_t>(power_of_two_from(std::max(by_bytes, by_line)), kMaxLanes));
    const int64_t pieces_at_once = launch.threads / launch.lanes;
    launch.blocks = static_cast<int>(
        std::min<int64_t>((launch.num_pieces - 1) / pieces_at_once + 1, max_blocks));
    return launch;
}

// Numbers of items that travel with a launch: no memory that would have to live until the kernel
// has run, and no copy ahead of it. As many as fit into the 4 KiB of parameters that every CUDA
// device takes.
inline constexpr int kOwnItems = 192;

struct OwnNumbers {
    int64_t ids[kOwnItems];
    int64_t object_starts[kOwnItems];

    MARU_HD ItemNumbers view() const {
        return ItemNumbers{ids, object_starts};
    }
};

static_assert(sizeof(StridedCopy) + sizeof(OwnNumbers) + sizeof(CopyLaunch) <= 4096);

// The part of a copy from item `first` on that fits into one launch, and its numbers. The ids of
// `copy` are read here, so they lie in host memory. Next: `first` plus the part's num_items.
inline StridedCopy own_part(const StridedCopy& copy, int64_t first, OwnNumbers& numbers) {
    StridedCopy part = copy;
    part.ids = nullptr;
    part.object_starts = nullptr;
    part.first_item = 0;
    part.num_items = std::min<int64_t>(kOwnItems, copy.num_items - first);
    part.items_per_object = std::max<int64_t>(1, part.num_items);
    for (int64_t i = 0; i < part.num_items; ++i) {
        const int64_t item = first + i;
        const int64_t object = copy.objects[item / copy.items_per_object] - copy.objects[0];
        numbers.ids[i] = copy.ids[item];
        numbers.object_starts[i] =
            object + (copy.object_starts != nullptr
                          ? copy.object_starts[item]
                          : item % copy.items_per_object * copy.object_item_stride);
    }
    return part;
}

} // namespace maru
