// One strided copy: every copy between a paged cache and objects is a list of these.
//
// A copy moves rows of equal length. Its index space is
//
//     axes[0] .. axes[num_outer_axes - 1]  item  axes[num_outer_axes] .. axes[num_axes - 1]
//
// outermost first. An item is what the block table names: a token's slot, a block, or a place that
// was computed before. Rows are numbered in this order, so that neighbouring rows are neighbours in
// the object. All strides and sizes are bytes, all numbers 64 bits wide: a context of a million
// tokens has offsets far beyond 32.
//
// The same functions compute addresses on the device and on the host, where tests replay them.

#pragma once

#include <cstdint>

#include "formats.h"

#if defined(__CUDACC__)
#define MARU_HD __host__ __device__ __forceinline__
#else
#define MARU_HD inline
#endif

namespace maru {

inline constexpr int kMaxAxes = 5;     // layer, plane, kernel block, head, token
inline constexpr int kMaxObjects = 64; // of one copy; keeps it within a kernel's parameters
inline constexpr int kMaxOwnPointers = 2;

struct CopyAxis {
    int64_t count;
    int64_t cache_stride;
    int64_t object_stride;
    int64_t pointer_step; // base addresses from one index to the next
};

struct StridedCopy {
    TransferDirection direction;
    int64_t row_bytes;

    int num_axes;
    int num_outer_axes; // how many of the axes lie outside the items
    CopyAxis axes[kMaxAxes];

    // Items. A negative id is skipped. Readable where the copy runs.
    const int64_t* ids;
    int64_t first_item; // items before it are not touched
    int64_t num_items;  // behind the last item

    // Cache side: base + cache_offset + id / slots_per_block * block_stride
    //                                 + id % slots_per_block * slot_stride + axes
    const int64_t* cache_pointers;         // base addresses, readable where the copy runs; or null:
    int64_t own_pointers[kMaxOwnPointers]; // base addresses that travel with the copy
    int64_t cache_offset;
    int64_t slots_per_block;
    int64_t block_stride;
    int64_t slot_stride;

    // Object side: object + object_offset + (object_starts ? object_starts[item] : place * stride)
    //              + axes, where place is the item's number inside its object.
    const int64_t* object_starts; // or null; readable where the copy runs
    int64_t object_offset;
    int64_t items_per_object;
    int64_t object_item_stride;
    int64_t objects[kMaxObjects]; // base addresses

    MARU_HD int64_t rows_of_an_item() const {
        int64_t rows = 1;
        for (int i = 0; i < num_axes; ++i)
            rows *= axes[i].count;
        return rows;
    }
    MARU_HD int64_t num_rows() const {
        const int64_t items = num_items - first_item;
        return items > 0 && row_bytes > 0 ? items * rows_of_an_item() : 0;
    }
};

// Both ends of one row. Null where the item is skipped.
struct RowPlace {
    uint8_t* cache;
    uint8_t* object;
};

MARU_HD int64_t cache_offset_of_id(const StridedCopy& copy, int64_t id) {
    return id / copy.slots_per_block * copy.block_stride +
           id % copy.slots_per_block * copy.slot_stride;
}

// The numbers of the items, where they do not lie where the copy says: a kernel gets them with its
// parameters.
struct ItemNumbers {
    const int64_t* ids;
    const int64_t* object_starts; // or null
};

MARU_HD RowPlace locate_row(const StridedCopy& copy, const ItemNumbers& numbers, int64_t row) {
    int64_t pointer = 0;
    int64_t cache = copy.cache_offset;
    int64_t object = copy.object_offset;
    int64_t rest = row;
    for (int i = copy.num_axes - 1; i >= copy.num_outer_axes; --i) {
        const CopyAxis& axis = copy.axes[i];
        const int64_t index = rest % axis.count;
        rest /= axis.count;
        pointer += index * axis.pointer_step;
        cache += index * axis.cache_stride;
        object += index * axis.object_stride;
    }
    const int64_t items = copy.num_items - copy.first_item;
    const int64_t item = copy.first_item + rest % items;
    rest /= items;
    const int64_t id = numbers.ids[item];
    if (id < 0)
        return RowPlace{nullptr, nullptr};
    for (int i = copy.num_outer_axes - 1; i >= 0; --i) {
        const CopyAxis& axis = copy.axes[i];
        const int64_t index = rest % axis.count;
        rest /= axis.count;
        pointer += index * axis.pointer_step;
        cache += index * axis.cache_stride;
        object += index * axis.object_stride;
    }
    cache +=
        copy.cache_pointers != nullptr ? copy.cache_pointers[pointer] : copy.own_pointers[pointer];
    cache += cache_offset_of_id(copy, id);
    object += copy.objects[item / copy.items_per_object];
    object += numbers.object_starts != nullptr
                  ? numbers.object_starts[item]
                  : item % copy.items_per_object * copy.object_item_stride;
    return RowPlace{reinterpret_cast<uint8_t*>(cache), reinterpret_cast<uint8_t*>(object)};
}

MARU_HD RowPlace locate_row(const StridedCopy& copy, int64_t row) {
    return locate_row(copy, ItemNumbers{copy.ids, copy.object_starts}, row);
}

} // namespace maru
