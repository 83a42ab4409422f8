// Tensors as Python objects, read by their attributes.
//
// Neither binding includes torch's C++ headers: they take over a minute to compile, and tie a build
// to one version of torch where five attributes would do.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../csrc/transfers.h"

namespace maru::binding {

namespace py = pybind11;

struct TensorArgument {
    TensorFacts facts;
    std::string device_type; // "cpu", "cuda"
    int device_index = -1;
    std::string dtype; // "torch.int64"
    py::object object; // keeps the memory alive

    int64_t num_elements() const {
        int64_t count = 1;
        for (const int64_t size : facts.sizes)
            count *= size;
        return count;
    }
};

inline TensorArgument tensor_argument(const char* name, const py::object& object) {
    if (!py::hasattr(object, "data_ptr") || !py::hasattr(object, "element_size"))
        throw py::type_error(std::string(name) + ": expected a tensor, found " +
                             std::string(py::str(py::type::of(object).attr("__name__"))));
    TensorArgument tensor;
    tensor.object = object;
    tensor.facts.address = object.attr("data_ptr")().cast<int64_t>();
    tensor.facts.element_size = object.attr("element_size")().cast<int64_t>();
    for (const py::handle size : object.attr("shape"))
        tensor.facts.sizes.push_back(size.cast<int64_t>());
    for (const py::handle stride : object.attr("stride")())
        tensor.facts.strides.push_back(stride.cast<int64_t>());
    const py::object device = object.attr("device");
    tensor.device_type = device.attr("type").cast<std::string>();
    const py::object index = device.attr("index");
    tensor.device_index = index.is_none() ? -1 : index.cast<int>();
    tensor.dtype = py::str(object.attr("dtype"));
    return tensor;
}

// Which memory a copy can reach. Each binding has its own answer.
class Reach {
  public:
    virtual ~Reach() = default;
    // std::invalid_argument, with what to do, if a copy cannot read and write this tensor.
    virtual void check(const char* name, const TensorArgument& tensor) const = 0;
};

// int64 numbers that a copy reads: slots, block ids, addresses.
inline NumberList number_list(const char* name, const TensorArgument& tensor, const Reach& reach) {
    if (tensor.dtype != "torch.int64")
        throw py::type_error(std::string(name) + ": expected int64, found " + tensor.dtype);
    if (tensor.facts.rank() != 1 || (tensor.facts.sizes[0] > 1 && tensor.facts.strides[0] != 1))
        throw std::invalid_argument(std::string(name) +
                                    ": expected one contiguous dimension of int64");
    reach.check(name, tensor);
    return NumberList{reinterpret_cast<const int64_t*>(tensor.facts.address),
                      tensor.facts.sizes[0]};
}

} // namespace maru::binding
