// The arguments of the three copy operations, from Python to strided copies. Used by both bindings,
// so that names, order, defaults and refusals cannot differ between them.

#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "tensor_argument.h"

namespace maru::binding {

// One call, ready to run: the copies, what they count in, and what keeps that memory alive.
struct Operation {
    TransferPlan plan;
    TensorArgument ids;
    std::vector<TensorArgument> memory;
};

inline int64_t number_of(const char* name, const py::object& value) {
    try {
        return py::int_(value).cast<int64_t>();
    } catch (const py::error_already_set&) {
        throw py::type_error(std::string(name) + ": expected a member of its enumeration, found " +
                             std::string(py::str(value)));
    }
}

inline TransferDirection direction_argument(const py::object& value) {
    return direction_of(number_of("direction", value));
}

inline EngineKVFormat format_argument(const py::object& value) {
    return format_of(number_of("engine_kv_format", value));
}

inline Operation multi_layer_operation(const Reach& reach, const py::object& key_value,
                                       const py::object& key_value_ptrs,
                                       const py::object& slot_mapping, int64_t page_buffer_size,
                                       const py::object& direction,
                                       const py::object& engine_kv_format, int64_t block_size,
                                       int64_t head_size, int64_t skip_prefix_n_tokens,
                                       int64_t block_stride_elems) {
    Operation operation;
    const TensorArgument object = tensor_argument("key_value", key_value);
    const TensorArgument pointers = tensor_argument("key_value_ptrs", key_value_ptrs);
    operation.ids = tensor_argument("slot_mapping", slot_mapping);
    reach.check("key_value", object);
    MultiLayerArguments arguments;
    arguments.key_value = object.facts;
    arguments.pointers = number_list("key_value_ptrs", pointers, reach);
    arguments.slots = number_list("slot_mapping", operation.ids, reach);
    arguments.page_buffer_size = page_buffer_size;
    arguments.direction = direction_argument(direction);
    arguments.format = format_argument(engine_kv_format);
    arguments.block_size = block_size;
    arguments.head_size = head_size;
    arguments.skip_prefix_n_tokens = skip_prefix_n_tokens;
    arguments.block_stride_elems = block_stride_elems;
    operation.plan = plan_multi_layer(arguments);
    operation.memory = {object, pointers};
    return operation;
}

inline Operation single_layer_operation(const Reach& reach, const py::object& lmc_key_value_cache,
                                        const py::object& vllm_key_value_cache,
                                        const py::object& slot_mapping, const py::object& direction,
                                        const py::object& engine_kv_format, bool token_major) {
    Operation operation;
    const TensorArgument staging = tensor_argument("lmc_key_value_cache", lmc_key_value_cache);
    operation.ids = tensor_argument("slot_mapping", slot_mapping);
    reach.check("lmc_key_value_cache", staging);
    SingleLayerArguments arguments;
    arguments.staging = staging.facts;
    operation.memory = {staging};
    const bool is_list = py::isinstance<py::list>(vllm_key_value_cache) ||
                         py::isinstance<py::tuple>(vllm_key_value_cache);
    std::vector<py::object> tensors{vllm_key_value_cache};
    if (is_list)
        tensors = vllm_key_value_cache.cast<std::vector<py::object>>();
    for (const py::object& tensor : tensors) {
        const TensorArgument cache = tensor_argument("vllm_key_value_cache", tensor);
        reach.check("vllm_key_value_cache", cache);
        if (cache.dtype != staging.dtype)
            throw std::invalid_argument("vllm_key_value_cache: expected " + staging.dtype +
                                        " as in lmc_key_value_cache, found " + cache.dtype);
        arguments.cache.push_back(cache.facts);
        operation.memory.push_back(cache);
    }
    arguments.slots = number_list("slot_mapping", operation.ids, reach);
    arguments.direction = direction_argument(direction);
    arguments.format = format_argument(engine_kv_format);
    arguments.order = token_major ? StagingOrder::kTokenMajor : StagingOrder::kPlaneMajor;
    operation.plan = plan_single_layer(arguments);
    return operation;
}

// A shape description of any module: what counts is its attributes.
inline PageBufferShapeDesc shape_argument(const py::object& shape) {
    const auto field = [&shape](const char* name) {
        if (!py::hasattr(shape, name))
            throw py::type_error(std::string("shape_desc: expected a PageBufferShapeDesc, found ") +
                                 std::string(py::str(shape)) + " without " + name);
        return shape.attr(name).cast<int64_t>();
    };
    PageBufferShapeDesc desc;
    desc.kv_size = field("kv_size");
    desc.nl = field("nl");
    desc.nb = field("nb");
    desc.bs = field("bs");
    desc.nh = field("nh");
    desc.hs = field("hs");
    desc.element_size = field("element_size");
    desc.block_stride_elems = field("block_stride_elems");
    return desc;
}

inline Operation block_operation(const Reach& reach, const py::object& paged_buffer_ptrs_tensor,
                                 const std::vector<int64_t>& object_ptrs,
                                 const py::object& block_ids, const py::object& direction,
                                 const py::object& shape_desc, int64_t chunk_tokens,
                                 const py::object& engine_kv_format, int64_t skip_prefix_n_blocks) {
    Operation operation;
    const TensorArgument pointers =
        tensor_argument("paged_buffer_ptrs_tensor", paged_buffer_ptrs_tensor);
    operation.ids = tensor_argument("block_ids", block_ids);
    BlockArguments arguments;
    arguments.pointers = number_list("paged_buffer_ptrs_tensor", pointers, reach);
    arguments.objects = object_ptrs;
    arguments.blocks = number_list("block_ids", operation.ids, reach);
    arguments.direction = direction_argument(direction);
    arguments.shape = shape_argument(shape_desc);
    arguments.chunk_tokens = chunk_tokens;
    arguments.format = format_argument(engine_kv_format);
    arguments.skip_prefix_n_blocks = skip_prefix_n_blocks;
    operation.plan = plan_blocks(arguments);
    operation.memory = {pointers};
    return operation;
}

// Registers the types that callers of the operations name. They are local to the module, so that
// another extension with types of the same names can live in the process.
inline void bind_types(py::module_& module) {
    py::enum_<TransferDirection>(module, "TransferDirection", py::module_local(), py::arithmetic())
        .value("H2D", TransferDirection::H2D)
        .value("D2H", TransferDirection::D2H);
    py::enum_<EngineKVFormat> formats(module, "EngineKVFormat", py::module_local(),
                                      py::arithmetic());
    for (const FormatFacts& facts : kFormats)
        formats.value(facts.name, facts.format);
    py::class_<PageBufferShapeDesc>(module, "PageBufferShapeDesc", py::module_local())
        .def(py::init([](int64_t kv_size, int64_t nl, int64_t nb, int64_t bs, int64_t nh,
                         int64_t hs, int64_t element_size, int64_t block_stride_elems) {
                 return PageBufferShapeDesc{kv_size, nl, nb,           bs,
                                            nh,      hs, element_size, block_stride_elems};
             }),
             py::arg("kv_size") = 0, py::arg("nl") = 0, py::arg("nb") = 0, py::arg("bs") = 0,
             py::arg("nh") = 0, py::arg("hs") = 0, py::arg("element_size") = 0,
             py::arg("block_stride_elems") = 0)
        .def_readwrite("kv_size", &PageBufferShapeDesc::kv_size)
        .def_readwrite("nl", &PageBufferShapeDesc::nl)
        .def_readwrite("nb", &PageBufferShapeDesc::nb)
        .def_readwrite("bs", &PageBufferShapeDesc::bs)
        .def_readwrite("nh", &PageBufferShapeDesc::nh)
        .def_readwrite("hs", &PageBufferShapeDesc::hs)
        .def_readwrite("element_size", &PageBufferShapeDesc::element_size)
        .def_readwrite("block_stride_elems", &PageBufferShapeDesc::block_stride_elems);
}

// Defines the three operations; `run` takes an Operation, and the device that was named or none.
template <class Run> void bind_operations(py::module_& module, const Reach& reach, Run run) {
    module.def(
        "multi_layer_kv_transfer",
        [&reach, run](const py::object& key_value, const py::object& key_value_ptrs,
                      const py::object& slot_mapping, const py::object& paged_memory_device,
                      int64_t page_buffer_size, const py::object& direction,
                      const py::object& engine_kv_format, int64_t block_size, int64_t head_size,
                      int64_t skip_prefix_n_tokens, int64_t block_stride_elems) {
            run(multi_layer_operation(reach, key_value, key_value_ptrs, slot_mapping,
                                      page_buffer_size, direction, engine_kv_format, block_size,
                                      head_size, skip_prefix_n_tokens, block_stride_elems),
                paged_memory_device);
        },
        "All layers of a token range, between an object [kv_size, layers, tokens, width] and "
        "pages.",
        py::arg("key_value"), py::arg("key_value_ptrs"), py::arg("slot_mapping"),
        py::arg("paged_memory_device"), py::arg("page_buffer_size"), py::arg("direction"),
        py::arg("engine_kv_format"), py::arg("block_size") = 0, py::arg("head_size") = 0,
        py::arg("skip_prefix_n_tokens") = 0, py::arg("block_stride_elems") = 0);
    module.def(
        "single_layer_kv_transfer",
        [&reach, run](const py::object& lmc_key_value_cache, const py::object& vllm_key_value_cache,
                      const py::object& slot_mapping, const py::object& direction,
                      const py::object& engine_kv_format, bool token_major) {
            Operation operation =
                single_layer_operation(reach, lmc_key_value_cache, vllm_key_value_cache,
                                       slot_mapping, direction, engine_kv_format, token_major);
            const py::object device = operation.memory.back().object.attr("device");
            run(std::move(operation), device);
        },
        "One layer, between a staging tensor and the layer's pages.",
        py::arg("lmc_key_value_cache"), py::arg("vllm_key_value_cache"), py::arg("slot_mapping"),
        py::arg("direction"), py::arg("engine_kv_format"), py::arg("token_major") = false);
    module.def(
        "multi_layer_block_kv_transfer",
        [&reach, run](const py::object& paged_buffer_ptrs_tensor,
                      const std::vector<int64_t>& object_ptrs, const py::object& block_ids,
                      const py::object& device, const py::object& direction,
                      const py::object& shape_desc, int64_t chunk_tokens,
                      const py::object& engine_kv_format, int64_t skip_prefix_n_blocks) {
            run(block_operation(reach, paged_buffer_ptrs_tensor, object_ptrs, block_ids, direction,
                                shape_desc, chunk_tokens, engine_kv_format, skip_prefix_n_blocks),
                device);
        },
        "Whole blocks of all layers, between a list of objects and pages.",
        py::arg("paged_buffer_ptrs_tensor"), py::arg("object_ptrs"), py::arg("block_ids"),
        py::arg("device"), py::arg("direction"), py::arg("shape_desc"), py::arg("chunk_tokens"),
        py::arg("engine_kv_format"), py::arg("skip_prefix_n_blocks"));
}

} // namespace maru::binding
