// What maru_kv_ops._C does, replayed on the host: the same arguments, plans, launches and bodies.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "../../../maru_kv_ops/binding/debug_checks.h"
#include "../../../maru_kv_ops/binding/operations.h"
#include "../../../maru_kv_ops/binding/plan_argument.h"
#include "replay.h"

namespace py = pybind11;

namespace {

replay::Way way = replay::Way::kKernel;
int max_blocks = 1;
replay::Record last;

class AnyReach : public maru::binding::Reach {
  public:
    void check(const char*, const maru::binding::TensorArgument&) const override {}
};

void run_operation(const maru::binding::Operation& operation, const py::object&) {
    const auto* first = reinterpret_cast<const int64_t*>(operation.ids.facts.address);
    const int64_t count = operation.ids.num_elements();
    if (maru::binding::debug_checks_are_on())
        maru::binding::debug_check_ids(operation.plan, {first, first + count});
    last = replay::run(operation.plan.copies, way, max_blocks);
}

py::dict launch_of(int64_t rows, int64_t row_bytes, int blocks_at_most) {
    maru::StridedCopy copy{};
    copy.row_bytes = row_bytes;
    copy.num_items = rows;
    const maru::CopyLaunch launch = maru::choose_launch(copy, blocks_at_most);
    py::dict result;
    result["blocks"] = launch.blocks;
    result["threads"] = launch.threads;
    result["lanes"] = launch.lanes;
    result["piece_bytes"] = launch.piece_bytes;
    result["pieces_per_row"] = launch.pieces_per_row;
    result["num_pieces"] = launch.num_pieces;
    return result;
}

using Intervals = std::vector<std::pair<int64_t, int64_t>>;

Intervals pairs(const std::vector<replay::Interval>& intervals) {
    Intervals result;
    for (const replay::Interval& interval : intervals)
        result.emplace_back(interval.first, interval.end);
    return result;
}

// Where a load of `layers` layers of these blocks reads and writes, by numbers alone. Rows of the
// object lie one behind the other, layers outermost.
std::pair<Intervals, Intervals> touched(const std::vector<int64_t>& ids, int64_t layers,
                                        int64_t row_bytes, int64_t cache, int64_t block_stride,
                                        int64_t layer_stride, int64_t object, int blocks_at_most) {
    maru::StridedCopy copy{};
    copy.direction = maru::TransferDirection::H2D;
    copy.row_bytes = row_bytes;
    copy.num_items = static_cast<int64_t>(ids.size());
    copy.num_axes = copy.num_outer_axes = 1;
    copy.axes[0] = {layers, layer_stride, copy.num_items * row_bytes, 0};
    copy.ids = ids.data();
    copy.own_pointers[0] = cache;
    copy.slots_per_block = 1;
    copy.block_stride = block_stride;
    copy.items_per_object = copy.num_items;
    copy.object_item_stride = row_bytes;
    copy.objects[0] = object;
    replay::Record record;
    replay::run_by_numbers_in_memory<replay::Addresses::kNumbers>(copy, blocks_at_most, record);
    record.check();
    return {pairs(replay::joined(record.reads, replay::Overlap::kJoined)),
            pairs(replay::joined(record.writes, replay::Overlap::kRefused))};
}

// How many pieces, and how many calls without batches, a copy engine gets for such a store.
std::pair<size_t, size_t> engine_calls(const std::vector<int64_t>& cache_starts,
                                       const std::vector<int64_t>& object_starts,
                                       int64_t row_bytes) {
    maru::StridedCopy copy{};
    copy.direction = maru::TransferDirection::D2H;
    copy.row_bytes = row_bytes;
    copy.num_items = static_cast<int64_t>(cache_starts.size());
    copy.ids = cache_starts.data();
    copy.object_starts = object_starts.data();
    copy.own_pointers[0] = int64_t{1} << 40; // a null address is no place
    copy.objects[0] = int64_t{1} << 41;
    copy.slots_per_block = 1;
    copy.block_stride = 1;
    copy.items_per_object = std::max<int64_t>(1, copy.num_items);
    const std::vector<maru::CopyEntry> entries = maru::contiguous_entries({copy});
    return {entries.size(), maru::rectangles_of(entries).size()};
}

} // namespace

PYBIND11_MODULE(kernel_replay, module) {
    static const AnyReach reach;
    maru::binding::bind_types(module);
    maru::binding::bind_operations(module, reach, run_operation);
    py::enum_<replay::Way>(module, "Way", py::module_local())
        .value("KERNEL", replay::Way::kKernel)
        .value("OWN_NUMBERS", replay::Way::kOwnNumbers)
        .value("BATCH", replay::Way::kBatch)
        .value("RECTANGLES", replay::Way::kRectangles);
    module.def(
        "use",
        [](replay::Way which, int blocks_at_most) {
            way = which;
            max_blocks = blocks_at_most;
        },
        py::arg("way"), py::arg("max_blocks"));
    module.def(
        "run_plan",
        [](const py::object& plan, const std::vector<int64_t>& region_addresses,
           int64_t object_address) {
            last = replay::run(
                maru::binding::plan_argument(plan, region_addresses, object_address).copies, way,
                max_blocks);
        },
        py::arg("plan"), py::arg("region_addresses"), py::arg("object_address"));
    module.def("forget", [] { last = replay::Record{}; });
    module.def("num_written", [] { return last.num_written(); });
    module.def("stores_by_unit", [] { return last.stores_by_unit; });
    module.def("launch_of", launch_of, py::arg("rows"), py::arg("row_bytes"),
               py::arg("max_blocks"));
    module.def(
        "max_blocks_of_a_launch",
        [](int multiprocessors, bool host) {
            return maru::max_blocks_of_a_launch(
                multiprocessors, host ? maru::ObjectMemory::kHost : maru::ObjectMemory::kDevice);
        },
        py::arg("multiprocessors"), py::arg("host"));
    module.def("touched", touched, py::arg("ids"), py::arg("layers"), py::arg("row_bytes"),
               py::arg("cache"), py::arg("block_stride"), py::arg("layer_stride"),
               py::arg("object"), py::arg("max_blocks"));
    module.def("engine_calls", engine_calls, py::arg("cache_starts"), py::arg("object_starts"),
               py::arg("row_bytes"));
    module.attr("OWN_ITEMS") = maru::kOwnItems;
}
