// What one thread of the kernel does. Compiles for the device, and for the host, where tests run it
// for every (block, thread) of a launch.

#pragma once

#include <cstdint>

#include "kernel_launch.h"
#include "row_copy.h"
#include "strided_copy.h"

namespace maru {

template <class Memory>
MARU_HD void strided_copy_body(const StridedCopy& copy, const ItemNumbers& numbers,
                               const CopyLaunch& launch, int block, int thread, Memory& memory) {
    const bool load = copy.direction == TransferDirection::H2D;
    const int lane = thread % launch.lanes;
    const int groups = launch.threads / launch.lanes;
    const int64_t stride = int64_t{launch.blocks} * groups;
    for (int64_t piece = int64_t{block} * groups + thread / launch.lanes; piece < launch.num_pieces;
         piece += stride) {
        const RowPlace place = locate_row(copy, numbers, piece / launch.pieces_per_row);
        if (place.cache == nullptr)
            continue;
        const int64_t offset = piece % launch.pieces_per_row * launch.piece_bytes;
        const int64_t rest = copy.row_bytes - offset;
        uint8_t* to = (load ? place.cache : place.object) + offset;
        const uint8_t* from = (load ? place.object : place.cache) + offset;
        move_piece(memory, to, from, rest < launch.piece_bytes ? rest : launch.piece_bytes, lane,
                   launch.lanes);
    }
}

} // namespace maru
