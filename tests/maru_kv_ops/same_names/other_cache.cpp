// A stand-in for another package's extension: types of the same names as ours, registered for the
// whole process, both as C++ types of their own and as another build of our own types would.

#include <pybind11/pybind11.h>

enum class TransferDirection { H2D = 0, D2H = 1 };
enum class EngineKVFormat { NL_X_NB_BS_HS = 3 };
struct PageBufferShapeDesc {
    int kv_size = 0;
};

namespace maru {
enum class TransferDirection : int { H2D = 0, D2H = 1 };
enum class EngineKVFormat : int { NL_X_NB_BS_HS = 3 };
struct PageBufferShapeDesc {
    int kv_size = 0;
};
} // namespace maru

namespace py = pybind11;

template <class Direction, class Format, class Shape> void register_types(py::module_ where) {
    py::enum_<Direction>(where, "TransferDirection")
        .value("H2D", Direction::H2D)
        .value("D2H", Direction::D2H);
    py::enum_<Format>(where, "EngineKVFormat").value("NL_X_NB_BS_HS", Format::NL_X_NB_BS_HS);
    py::class_<Shape>(where, "PageBufferShapeDesc")
        .def(py::init<>())
        .def_readwrite("kv_size", &Shape::kv_size);
}

void register_everything(py::module_& module) {
    register_types<TransferDirection, EngineKVFormat, PageBufferShapeDesc>(module);
    register_types<maru::TransferDirection, maru::EngineKVFormat, maru::PageBufferShapeDesc>(
        module.def_submodule("another_build"));
}

PYBIND11_MODULE(other_cache, module) {
    register_everything(module);
}

// The same, for a copy of the file under this name.
PYBIND11_MODULE(other_cache_again, module) {
    register_everything(module);
}
