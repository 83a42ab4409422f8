// Walking the rows of a strided copy in order, without a division for each.
//
// A host thread copies thousands of neighbouring rows; locate_row would spend as long on finding a
// small row as on moving it. The walk gives the same places in the same order, and a test holds the
// two together.

#pragma once

#include <cstdint>

#include "strided_copy.h"

namespace maru {

class RowWalk {
  public:
    RowWalk(const StridedCopy& copy, int64_t first_row) : copy_(copy), row_(first_row) {
        int64_t rest = first_row;
        for (int i = copy.num_axes - 1; i >= copy.num_outer_axes; --i)
            rest = take_index(i, rest);
        const int64_t items = copy.num_items - copy.first_item;
        item_ = copy.first_item + rest % items;
        rest /= items;
        for (int i = copy.num_outer_axes - 1; i >= 0; --i)
            rest = take_index(i, rest);
        find_item();
    }

    int64_t row() const {
        return row_;
    }

    RowPlace place() const {
        if (skipped_)
            return RowPlace{nullptr, nullptr};
        return RowPlace{reinterpret_cast<uint8_t*>(item_cache_ + axes_cache_ + base()),
                        reinterpret_cast<uint8_t*>(item_object_ + axes_object_)};
    }

    void next() {
        ++row_;
        for (int i = copy_.num_axes - 1; i >= copy_.num_outer_axes; --i) {
            if (step(i))
                return;
        }
        if (++item_ < copy_.num_items) {
            find_item();
            return;
        }
        item_ = copy_.first_item;
        find_item();
        for (int i = copy_.num_outer_axes - 1; i >= 0; --i) {
            if (step(i))
                return;
        }
    }

  private:
    int64_t take_index(int axis, int64_t rest) {
        const CopyAxis& by = copy_.axes[axis];
        index_[axis] = rest % by.count;
        axes_cache_ += index_[axis] * by.cache_stride;
        axes_object_ += index_[axis] * by.object_stride;
        pointer_ += index_[axis] * by.pointer_step;
        return rest / by.count;
    }

    // Moves on along one axis; false if it starts again at 0.
    bool step(int axis) {
        const CopyAxis& by = copy_.axes[axis];
        if (++index_[axis] < by.count) {
            axes_cache_ += by.cache_stride;
            axes_object_ += by.object_stride;
            pointer_ += by.pointer_step;
            return true;
        }
        index_[axis] = 0;
        axes_cache_ -= (by.count - 1) * by.cache_stride;
        axes_object_ -= (by.count - 1) * by.object_stride;
        pointer_ -= (by.count - 1) * by.pointer_step;
        return false;
    }

    void find_item() {
        const int64_t id = copy_.ids[item_];
        skipped_ = id < 0;
        if (skipped_)
            return;
        const int64_t place = item_ % copy_.items_per_object;
        item_cache_ = copy_.cache_offset + cache_offset_of_id(copy_, id);
        item_object_ = copy_.object_offset + copy_.objects[item_ / copy_.items_per_object] +
                       (copy_.object_starts != nullptr ? copy_.object_starts[item_]
                                                       : place * copy_.object_item_stride);
    }

    int64_t base() const {
        return copy_.cache_pointers != nullptr ? copy_.cache_pointers[pointer_]
                                               : copy_.own_pointers[pointer_];
    }

    const StridedCopy& copy_;
    int64_t row_;
    int64_t item_ = 0;
    bool skipped_ = false;
    int64_t item_cache_ = 0, item_object_ = 0;
    int64_t axes_cache_ = 0, axes_object_ = 0, pointer_ = 0;
    int64_t index_[kMaxAxes] = {};
};

} // namespace maru
