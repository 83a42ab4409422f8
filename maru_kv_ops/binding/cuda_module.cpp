// maru_kv_ops._C: the copy operations between a CUDA device and host memory.
//
// The three operations and run_plan queue work on the calling thread's current stream of the paged
// cache's device and return; nothing waits for it, unless MARU_DEBUG_CHECKS=1. Every tensor of a
// call, and the memory behind every address, has to stay until the stream has come past the work.
// Importing needs neither a device nor a driver.

// Torch's own headers are not free of warnings.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#pragma GCC diagnostic pop

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../csrc/copy_engine.h"
#include "../csrc/strided_copy_kernel.h"
#include "debug_checks.h"
#include "operations.h"
#include "plan_argument.h"

#ifndef MARU_KERNEL_REVISION
#define MARU_KERNEL_REVISION ""
#endif
#ifndef MARU_SOURCES_DIGEST
#define MARU_SOURCES_DIGEST ""
#endif
#ifndef MARU_TORCH_VERSION
#define MARU_TORCH_VERSION ""
#endif
#ifndef MARU_CUDA_VERSION
#define MARU_CUDA_VERSION ""
#endif
#ifndef MARU_ARCH_LIST
#define MARU_ARCH_LIST ""
#endif

namespace py = pybind11;

namespace {

using maru::binding::Operation;
using maru::binding::PlanArgument;
using maru::binding::TensorArgument;

// ------------------------------------------------------------------------------------ refusals

constexpr const char* kHowToPin =
    "; a kernel reads host memory only where it is pinned and mapped: allocate it with "
    "pin_memory=True, call pin_memory(), or register it with cudaHostRegister";

template <class... Parts> std::string text(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess)
        throw std::runtime_error(text("maru_kv_ops._C: ", what, ": ", cudaGetErrorString(error),
                                      " (", cudaGetErrorName(error), ")"));
}

// Whether a kernel can reach a tensor, as far as torch knows: asks no CUDA.
class DeviceReach : public maru::binding::Reach {
  public:
    void check(const char* name, const TensorArgument& tensor) const override {
        if (tensor.device_type == "cuda" || tensor.num_elements() == 0)
            return;
        if (tensor.device_type != "cpu")
            throw std::invalid_argument(
                text(name,
                     ": expected a tensor on a CUDA device or in pinned host memory, found one on ",
                     tensor.device_type));
        if (!tensor.object.attr("is_pinned")().cast<bool>())
            throw std::invalid_argument(
                text(name, ": found a tensor in host memory that is not pinned", kHowToPin));
    }
};

// ------------------------------------------------------------------------------------ the device

struct Device {
    c10::DeviceIndex index = -1; // -1: the current one

    static Device of(const py::object& argument) {
        const std::string name = py::str(argument);
        const std::string kind = name.substr(0, name.find(':'));
        const std::string number = kind.size() < name.size() ? name.substr(kind.size() + 1) : "";
        const bool is_number =
            number.size() <= 2 &&
            std::all_of(number.begin(), number.end(), [](char c) { return c >= '0' && c <= '9'; });
        if (kind != "cuda" || !is_number || (number.empty() && name != kind))
            throw std::invalid_argument(text("device: expected a CUDA device, found ", name,
                                             "; maru_kv_ops.torch_ops copies anywhere, "
                                             "maru_kv_ops._host in host memory"));
        return Device{static_cast<c10::DeviceIndex>(number.empty() ? -1 : std::stoi(number))};
    }

    void check_is_of(const char* name, const TensorArgument& tensor) const {
        if (tensor.device_type == "cuda" && index >= 0 && tensor.device_index >= 0 &&
            tensor.device_index != index)
            throw std::invalid_argument(
                text(name, ": expected a tensor on cuda:", int{index},
                     " or in host memory, found one on cuda:", tensor.device_index));
    }

    Device resolved() const {
        return Device{index >= 0 ? index : c10::cuda::current_device()};
    }

    int multiprocessors() const {
        int count = 0;
        check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index),
              "the number of multiprocessors");
        return count;
    }
};

// What CUDA knows about an address.
cudaPointerAttributes attributes_of(int64_t address) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, reinterpret_cast<const void*>(address)),
          "where an address lies");
    return attributes;
}

// Refuses an address that a kernel on the device could not use as it is.
maru::ObjectMemory check_address(const char* name, int64_t address, const Device& device) {
    const cudaPointerAttributes attributes = attributes_of(address);
    switch (attributes.type) {
    case cudaMemoryTypeDevice:
        if (attributes.device != device.index)
            throw std::invalid_argument(text(name, ": address ", address,
                                             " lies on cuda:", attributes.device,
                                             ", the cache on cuda:", int{device.index}));
        return maru::ObjectMemory::kDevice;
    case cudaMemoryTypeManaged:
        return maru::ObjectMemory::kDevice;
    case cudaMemoryTypeHost:
        if (reinterpret_cast<int64_t>(attributes.devicePointer) == address)
            return maru::ObjectMemory::kHost;
        throw std::invalid_argument(text(name, ": address ", address,
                                         " is pinned, but not mapped into the device at the same "
                                         "address; register it with cudaHostRegisterMapped"));
    default:
        throw std::invalid_argument(text(name, ": address ", address,
                                         " is neither the device's nor pinned host memory",
                                         kHowToPin));
    }
}

// Refuses a tensor of another device, and one in host memory that is not mapped into this one.
void check_reach(const char* name, const TensorArgument& tensor, const Device& device) {
    device.check_is_of(name, tensor);
    const int64_t elements = tensor.num_elements();
    if (tensor.device_type != "cpu" || elements == 0)
        return;
    int64_t last = 0;
    for (size_t i = 0; i < tensor.facts.sizes.size(); ++i)
        last += (tensor.facts.sizes[i] - 1) * tensor.facts.strides[i];
    check_address(name, tensor.facts.address, device);
    check_address(name, tensor.facts.address + last * tensor.facts.element_size, device);
}

// ------------------------------------------------------------------------------------ operations

// Reads the ids back, which waits for the stream.
std::vector<int64_t> ids_on_the_host(const maru::NumberList& ids, cudaStream_t stream) {
    constexpr const char* kWhat = "reading ids for MARU_DEBUG_CHECKS";
    std::vector<int64_t> values(static_cast<size_t>(ids.count));
    check(cudaMemcpyAsync(values.data(), ids.values, values.size() * sizeof(int64_t),
                          cudaMemcpyDefault, stream),
          kWhat);
    check(cudaStreamSynchronize(stream), kWhat);
    return values;
}

// Checks all object addresses, and says what they are.
maru::ObjectMemory check_objects(const maru::StridedCopy& copy, const Device& device) {
    maru::ObjectMemory memory = maru::ObjectMemory::kDevice;
    const int64_t objects = (copy.num_items - 1) / copy.items_per_object + 1;
    for (int64_t i = 0; i < objects; ++i) {
        if (check_address("objects", copy.objects[i], device) == maru::ObjectMemory::kHost)
            memory = maru::ObjectMemory::kHost;
    }
    return memory;
}

void run_operation(const Operation& operation, const py::object& device_argument) {
    Device device = Device::of(device_argument);
    device.check_is_of("ids", operation.ids);
    for (const TensorArgument& tensor : operation.memory)
        device.check_is_of("memory", tensor);
    const std::vector<maru::StridedCopy>& copies = operation.plan.copies;
    if (std::all_of(copies.begin(), copies.end(),
                    [](const maru::StridedCopy& copy) { return copy.num_rows() == 0; }))
        return;
    const maru::NumberList ids{reinterpret_cast<const int64_t*>(operation.ids.facts.address),
                               operation.ids.num_elements()};

    const py::gil_scoped_release release;
    device = device.resolved();
    const c10::cuda::CUDAGuard guard(device.index);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index).stream();
    check_reach("ids", operation.ids, device);
    for (const TensorArgument& tensor : operation.memory)
        check_reach("memory", tensor, device);
    std::vector<maru::ObjectMemory> objects;
    for (const maru::StridedCopy& copy : copies)
        objects.push_back(copy.num_rows() == 0 ? maru::ObjectMemory::kDevice
                                               : check_objects(copy, device));
    if (maru::binding::debug_checks_are_on())
        maru::binding::debug_check_ids(operation.plan, ids_on_the_host(ids, stream));
    const int multiprocessors = device.multiprocessors();
    for (size_t i = 0; i < copies.size(); ++i)
        check(maru::launch_strided_copy(
                  copies[i], maru::max_blocks_of_a_launch(multiprocessors, objects[i]), stream),
              "launching the kernel");
}

// ------------------------------------------------------------------------------------ plans

enum class CopyPath {
    kKernel,
    kCopyEngine,
};

void launch_plan(const PlanArgument& plan, maru::ObjectMemory objects, const Device& device,
                 cudaStream_t stream) {
    const int max_blocks = maru::max_blocks_of_a_launch(device.multiprocessors(), objects);
    for (const maru::StridedCopy& copy : plan.copies)
        check(maru::launch_with_own_numbers(copy, max_blocks, stream), "launching the kernel");
}

void queue_plan(const PlanArgument& plan, maru::TransferDirection direction, int64_t first_object,
                int64_t last_object, cudaStream_t stream) {
    const auto is_pinned = [](int64_t address) {
        return attributes_of(address).type != cudaMemoryTypeUnregistered;
    };
    const bool pinned = is_pinned(first_object) && is_pinned(last_object);
    check(maru::copy_with_engine(maru::contiguous_entries(plan.copies), direction,
                                 pinned ? maru::HostMemory::kPinned : maru::HostMemory::kPageable,
                                 stream),
          "queueing copies");
}

void run_plan(const py::object& plan, const std::vector<int64_t>& region_addresses,
              int64_t object_address, const py::object& device_argument, CopyPath path) {
    Device device = Device::of(device_argument);
    const PlanArgument argument =
        maru::binding::plan_argument(plan, region_addresses, object_address);
    const bool empty = std::all_of(argument.copies.begin(), argument.copies.end(),
                                   [](const maru::StridedCopy& c) { return c.num_rows() == 0; });
    if (empty)
        return;
    const int64_t last_object = object_address + plan.attr("object_end").cast<int64_t>() - 1;

    const py::gil_scoped_release release;
    device = device.resolved();
    const c10::cuda::CUDAGuard guard(device.index);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index).stream();
    if (path == CopyPath::kCopyEngine) {
        queue_plan(argument, argument.copies.front().direction, object_address, last_object,
                   stream);
        return;
    }
    check_address("object memory", last_object, device);
    launch_plan(argument, check_address("object memory", object_address, device), device, stream);
}

} // namespace

PYBIND11_MODULE(_C, module) {
    module.doc() = "Copies between paged KV caches on a CUDA device and objects.";
    static const DeviceReach reach;
    maru::binding::bind_types(module);
    maru::binding::bind_operations(module, reach, run_operation);

    py::enum_<CopyPath>(module, "CopyPath", py::module_local(), "What carries out a plan.")
        .value("KERNEL", CopyPath::kKernel)
        .value("COPY_ENGINE", CopyPath::kCopyEngine);
    module.def("run_plan", run_plan,
               "Queue the bytes of a maru_kv_ops.plan.CopyPlan. The caller has checked both "
               "memories. KERNEL needs pinned object memory.",
               py::arg("plan"), py::arg("region_addresses"), py::arg("object_address"),
               py::arg("device"), py::arg("path"));
    module.def("batches_are_available", maru::batches_are_available,
               "Whether the copy engine gets its work in batches (CUDA 12.8 and later).");
    module.def(
        "build_info",
        [] {
            py::dict info;
            info["kernel_revision"] = MARU_KERNEL_REVISION;
            info["sources_digest"] = MARU_SOURCES_DIGEST;
            info["cuda"] = MARU_CUDA_VERSION;
            info["torch"] = MARU_TORCH_VERSION;
            info["arch_list"] = MARU_ARCH_LIST;
            info["compiler"] = __VERSION__;
            return info;
        },
        "From which sources this module was compiled, and with what.");
}
