// The kernel's launches and the copy engine's calls, carried out on the host.

#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "../../../maru_kv_ops/csrc/copy_entries.h"
#include "../../../maru_kv_ops/csrc/kernel_body.h"
#include "../../../maru_kv_ops/csrc/kernel_launch.h"
#include "recording.h"

namespace replay {

enum class Way {
    kKernel,     // numbers of the items in memory
    kOwnNumbers, // numbers of the items in the launch's parameters
    kBatch,      // one piece after the other
    kRectangles, // as few calls as without batches
};

// Every thread of every block, one after the other: threads of a copy never wait for each other.
template <Addresses kAddresses>
void run_launch(const maru::StridedCopy& copy, const maru::ItemNumbers& numbers,
                const maru::CopyLaunch& launch, Record& record) {
    RecordingMemory<kAddresses> memory(record);
    for (int block = 0; block < launch.blocks; ++block) {
        for (int thread = 0; thread < launch.threads; ++thread)
            maru::strided_copy_body(copy, numbers, launch, block, thread, memory);
    }
}

// As launch_strided_copy of strided_copy_kernel.cu.
template <Addresses kAddresses>
void run_by_numbers_in_memory(const maru::StridedCopy& copy, int max_blocks, Record& record) {
    run_launch<kAddresses>(copy, {copy.ids, copy.object_starts},
                           maru::choose_launch(copy, max_blocks), record);
}

// As launch_with_own_numbers.
inline void run_by_own_numbers(const maru::StridedCopy& copy, int max_blocks, Record& record) {
    maru::OwnNumbers numbers{};
    for (int64_t first = copy.first_item; first < copy.num_items;) {
        const maru::StridedCopy part = maru::own_part(copy, first, numbers);
        first += part.num_items;
        run_launch<Addresses::kReal>(part, numbers.view(), maru::choose_launch(part, max_blocks),
                                     record);
    }
}

inline void copy_bytes(uint8_t* to, const uint8_t* from, int64_t bytes, Record& record) {
    if (bytes < 1)
        throw std::logic_error("an empty entry");
    const auto source = reinterpret_cast<int64_t>(from);
    const auto destination = reinterpret_cast<int64_t>(to);
    record.reads.push_back({source, source + bytes});
    record.writes.push_back({destination, destination + bytes});
    std::memcpy(to, from, static_cast<size_t>(bytes));
}

inline void run_rectangle(const maru::CopyRectangle& rectangle, Record& record) {
    const maru::CopyEntry& row = rectangle.row;
    if (rectangle.rows > 1 &&
        (rectangle.destination_pitch < row.bytes || rectangle.source_pitch < row.bytes ||
         rectangle.destination_pitch > maru::kMaxPitch || rectangle.source_pitch > maru::kMaxPitch))
        throw std::logic_error("a pitch that cudaMemcpy2DAsync refuses");
    for (int64_t i = 0; i < rectangle.rows; ++i)
        copy_bytes(row.destination + i * rectangle.destination_pitch,
                   row.source + i * rectangle.source_pitch, row.bytes, record);
}

// All copies of one call. std::logic_error where a rule is broken.
inline Record run(const std::vector<maru::StridedCopy>& copies, Way way, int max_blocks) {
    Record record;
    if (way == Way::kBatch || way == Way::kRectangles) {
        const std::vector<maru::CopyEntry> entries = maru::contiguous_entries(copies);
        if (way == Way::kBatch) {
            for (const maru::CopyEntry& entry : entries)
                copy_bytes(entry.destination, entry.source, entry.bytes, record);
        } else {
            for (const maru::CopyRectangle& rectangle : maru::rectangles_of(entries))
                run_rectangle(rectangle, record);
        }
    } else {
        for (const maru::StridedCopy& copy : copies) {
            if (way == Way::kKernel)
                run_by_numbers_in_memory<Addresses::kReal>(copy, max_blocks, record);
            else
                run_by_own_numbers(copy, max_blocks, record);
        }
    }
    record.check();
    return record;
}

} // namespace replay
