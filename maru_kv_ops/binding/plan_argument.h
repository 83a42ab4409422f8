// A CopyPlan of Python (maru_kv_ops.plan), read by its attributes, as strided copies.
//
// Every StridedCopy of the plan becomes one: its starts are the items, its repeats the axes. The
// plan's offsets count from a region's start and from the object memory's start; the executor that
// calls has checked both memories against the plan.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../csrc/strided_copy.h"
#include "../csrc/transfers.h"

namespace maru::binding {

namespace py = pybind11;

struct PlanArgument {
    std::vector<StridedCopy> copies;
    std::vector<std::vector<int64_t>> numbers; // two lists for each copy: cache and object starts
};

inline std::vector<int64_t> int64s_of(const py::handle& sequence) {
    std::vector<int64_t> values;
    values.reserve(py::len(sequence));
    for (const py::handle value : sequence)
        values.push_back(value.cast<int64_t>());
    return values;
}

inline StridedCopy copy_argument(const py::handle& plan_copy, TransferDirection direction,
                                 const std::vector<int64_t>& region_addresses,
                                 int64_t object_address, const std::vector<int64_t>& cache_starts,
                                 const std::vector<int64_t>& object_starts) {
    StridedCopy copy{};
    copy.direction = direction;
    copy.row_bytes = plan_copy.attr("width").cast<int64_t>();
    const auto region = plan_copy.attr("region").cast<size_t>();
    if (region >= region_addresses.size() || copy.row_bytes < 1 ||
        cache_starts.size() != object_starts.size())
        throw std::invalid_argument("plan: a copy in a region that was not given, without a width, "
                                    "or with unequal lists of starts");
    copy.own_pointers[0] = region_addresses[region];
    copy.ids = cache_starts.data();
    copy.object_starts = object_starts.data();
    copy.num_items = static_cast<int64_t>(cache_starts.size());
    copy.slots_per_block = 1;
    copy.block_stride = 1; // an id is the byte offset itself
    copy.items_per_object = copy.num_items > 0 ? copy.num_items : 1;
    copy.objects[0] = object_address;
    const int64_t item_stride =
        object_starts.size() > 1 ? object_starts[1] - object_starts[0] : copy.row_bytes;
    for (const py::handle repeat : plan_copy.attr("repeats")) {
        if (copy.num_axes == kMaxAxes)
            throw std::invalid_argument("plan: a copy of more axes than a layout can have");
        const CopyAxis axis{repeat.attr("count").cast<int64_t>(),
                            repeat.attr("cache_stride").cast<int64_t>(),
                            repeat.attr("object_stride").cast<int64_t>(), 0};
        copy.axes[copy.num_axes++] = axis;
        // Repeats come outermost in the object first, so these are a prefix.
        if (axis.object_stride > item_stride)
            copy.num_outer_axes = copy.num_axes;
    }
    return copy;
}

inline PlanArgument plan_argument(const py::handle& plan,
                                  const std::vector<int64_t>& region_addresses,
                                  int64_t object_address) {
    const TransferDirection direction =
        direction_of(py::int_(plan.attr("direction")).cast<int64_t>());
    PlanArgument argument;
    const py::object copies = plan.attr("copies");
    argument.numbers.reserve(2 * py::len(copies)); // so that the lists stay where they are
    for (const py::handle plan_copy : copies) {
        argument.numbers.push_back(int64s_of(plan_copy.attr("cache_starts")));
        argument.numbers.push_back(int64s_of(plan_copy.attr("object_starts")));
        const size_t last = argument.numbers.size() - 1;
        argument.copies.push_back(copy_argument(plan_copy, direction, region_addresses,
                                                object_address, argument.numbers[last - 1],
                                                argument.numbers[last]));
    }
    return argument;
}

} // namespace maru::binding
