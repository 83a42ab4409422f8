// maru_kv_ops._host: the copy operations between host memories. Needs pybind11 and no torch.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../csrc/host_copy.h"
#include "operations.h"
#include "plan_argument.h"

#ifndef MARU_KERNEL_REVISION
#define MARU_KERNEL_REVISION ""
#endif
#ifndef MARU_SOURCES_DIGEST
#define MARU_SOURCES_DIGEST ""
#endif

namespace py = pybind11;

namespace {

class HostReach : public maru::binding::Reach {
  public:
    void check(const char* name, const maru::binding::TensorArgument& tensor) const override {
        if (tensor.device_type != "cpu")
            throw std::invalid_argument(
                std::string(name) + ": expected a tensor in host memory, found one on " +
                tensor.device_type +
                "; maru_kv_ops._C copies between a device and the host, maru_kv_ops.torch_ops "
                "anywhere");
    }
};

void run_operation(const maru::binding::Operation& operation, const py::object& device) {
    const std::string where = py::str(device);
    if (where.rfind("cpu", 0) != 0)
        throw std::invalid_argument("device: expected the CPU, found " + where);
    const maru::NumberList ids{
        reinterpret_cast<const int64_t*>(operation.ids.facts.address),
        operation.ids.num_elements(),
    };
    const py::gil_scoped_release release;
    maru::check_ids(operation.plan, ids);
    maru::CopyThreads(1).run(operation.plan.copies);
}

} // namespace

PYBIND11_MODULE(_host, module) {
    module.doc() = "Copies between paged KV caches and objects in host memory.";
    static const HostReach reach;
    maru::binding::bind_types(module);
    maru::binding::bind_operations(module, reach, run_operation);

    py::class_<maru::CopyThreads>(module, "CopyThreads", py::module_local(),
                                  "Threads that share one copy; num_threads counts the caller.")
        .def(py::init<int>(), py::arg("num_threads"));
    module.def(
        "run_plan",
        [](const py::object& plan, const std::vector<int64_t>& region_addresses,
           int64_t object_address, maru::CopyThreads& threads) {
            const maru::binding::PlanArgument argument =
                maru::binding::plan_argument(plan, region_addresses, object_address);
            const py::gil_scoped_release release;
            threads.run(argument.copies);
        },
        "Move the bytes of a maru_kv_ops.plan.CopyPlan. The caller has checked both memories.",
        py::arg("plan"), py::arg("region_addresses"), py::arg("object_address"),
        py::arg("threads"));
    module.def(
        "build_info",
        [] {
            py::dict info;
            info["kernel_revision"] = MARU_KERNEL_REVISION;
            info["sources_digest"] = MARU_SOURCES_DIGEST;
            info["compiler"] = __VERSION__;
            return info;
        },
        "From which sources this module was compiled, and with what.");
}
