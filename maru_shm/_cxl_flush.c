/* Cache-line write-back and invalidation over byte ranges of a buffer.
 *
 * Memory that several hosts share over CXL is not snooped by this host's caches. A writer writes
 * its dirty lines back before it publishes; a reader drops its lines before it loads. The
 * instructions work in user mode on both architectures:
 *
 *   x86-64    write back: clwb, else clflushopt, else clflush (found by CPUID)
 *             invalidate: clflushopt, else clflush; there is no instruction that drops a dirty
 *             line without writing it back, and a reader has no dirty lines
 *             fence: mfence; sfence would order the flushes with later stores, but not with the
 *             loads that follow an invalidation
 *   aarch64   write back: dc cvac; invalidate: dc civac (user mode has no dc ivac); fence: dsb sy
 *   others    nothing; kind() says "none", and media that need flushes refuse to open
 *
 * Ranges are widened to whole lines. All functions check bounds and may be called from any thread;
 * the GIL is released for long ranges. No dependency but the C API of Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* One line takes some 10 ns to 100 ns; below this the hand-over of the GIL would cost as much. */
#define RELEASE_GIL_BYTES (64 * 1024)

typedef void (*range_function)(uintptr_t first, uintptr_t end);

static uintptr_t line_bytes = 64;
static range_function write_back_range;
static range_function invalidate_range;
static const char* kind_name;

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

__attribute__((target("clwb"))) static void range_clwb(uintptr_t first, uintptr_t end) {
    for (uintptr_t line = first; line < end; line += line_bytes)
        _mm_clwb((void*)line);
}

__attribute__((target("clflushopt"))) static void range_clflushopt(uintptr_t first, uintptr_t end) {
    for (uintptr_t line = first; line < end; line += line_bytes)
        _mm_clflushopt((void*)line);
}

static void range_clflush(uintptr_t first, uintptr_t end) {
    for (uintptr_t line = first; line < end; line += line_bytes)
        _mm_clflush((void*)line);
}

static void choose_instructions(void) {
    unsigned a, b, c, d;
    unsigned leaf7 = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) && ((b >> 8) & 0xff) != 0)
        line_bytes = ((b >> 8) & 0xff) * 8;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d))
        leaf7 = b;
    const int has_clflushopt = (leaf7 >> 23) & 1;
    const int has_clwb = (leaf7 >> 24) & 1;
    invalidate_range = has_clflushopt ? range_clflushopt : range_clflush;
    write_back_range = has_clwb ? range_clwb : invalidate_range;
    kind_name = has_clwb ? "clwb" : has_clflushopt ? "clflushopt" : "clflush";
}

static void full_fence(void) {
    _mm_mfence();
}

#elif defined(__aarch64__)

static void range_cvac(uintptr_t first, uintptr_t end) {
    for (uintptr_t line = first; line < end; line += line_bytes)
        __asm__ volatile("dc cvac, %0" : : "r"(line) : "memory");
}

static void range_civac(uintptr_t first, uintptr_t end) {
    for (uintptr_t line = first; line < end; line += line_bytes)
        __asm__ volatile("dc civac, %0" : : "r"(line) : "memory");
}

static void choose_instructions(void) {
    uint64_t type;
    __asm__("mrs %0, ctr_el0" : "=r"(type));
    line_bytes = (uintptr_t)4 << ((type >> 16) & 0xf); /* DminLine: log2 of words */
    write_back_range = range_cvac;
    invalidate_range = range_civac;
    kind_name = "dc-cvac/civac";
}

static void full_fence(void) {
    __asm__ volatile("dsb sy" : : : "memory");
}

#else

static void range_nothing(uintptr_t first, uintptr_t end) {
    (void)first;
    (void)end;
}

static void choose_instructions(void) {
    write_back_range = range_nothing;
    invalidate_range = range_nothing;
    kind_name = "none";
}

static void full_fence(void) {
#if defined(__GNUC__) || defined(__clang__)
    __sync_synchronize();
#endif
}

#endif

static PyObject* run_on_range(PyObject* args, const char* format, range_function function) {
    Py_buffer buffer;
    Py_ssize_t offset, length;
    if (!PyArg_ParseTuple(args, format, &buffer, &offset, &length))
        return NULL;
    if (offset < 0 || length < 0 || offset > buffer.len || length > buffer.len - offset) {
        PyErr_Format(PyExc_ValueError, "range of %zd bytes at %zd is outside a buffer of %zd bytes",
                     length, offset, buffer.len);
        PyBuffer_Release(&buffer);
        return NULL;
    }
    if (length > 0) {
        const uintptr_t start = (uintptr_t)buffer.buf + (uintptr_t)offset;
        const uintptr_t first = start & ~(line_bytes - 1);
        const uintptr_t end = start + (uintptr_t)length;
        if (length >= RELEASE_GIL_BYTES) {
            PyThreadState* state = PyEval_SaveThread();
            function(first, end);
            PyEval_RestoreThread(state);
        } else {
            function(first, end);
        }
    }
    PyBuffer_Release(&buffer);
    Py_RETURN_NONE;
}

static PyObject* write_back(PyObject* self, PyObject* args) {
    (void)self;
    return run_on_range(args, "y*nn:write_back", write_back_range);
}

static PyObject* invalidate(PyObject* self, PyObject* args) {
    (void)self;
    return run_on_range(args, "y*nn:invalidate", invalidate_range);
}

static PyObject* fence(PyObject* self, PyObject* unused) {
    (void)self;
    (void)unused;
    full_fence();
    Py_RETURN_NONE;
}

static PyObject* kind(PyObject* self, PyObject* unused) {
    (void)self;
    (void)unused;
    return PyUnicode_FromString(kind_name);
}

static PyObject* get_line_bytes(PyObject* self, PyObject* unused) {
    (void)self;
    (void)unused;
    return PyLong_FromSize_t((size_t)line_bytes);
}

static PyMethodDef methods[] = {
    {"write_back", write_back, METH_VARARGS,
     "write_back(buffer, offset, length)\n--\n\nWrite the range's dirty cache lines to memory; "
     "complete after fence()."},
    {"invalidate", invalidate, METH_VARARGS,
     "invalidate(buffer, offset, length)\n--\n\nDrop the range's cache lines; loads after fence() "
     "come from memory. Dirty lines are written back."},
    {"fence", fence, METH_NOARGS,
     "fence()\n--\n\nFull barrier, also for write-backs and invalidations."},
    {"kind", kind, METH_NOARGS,
     "kind()\n--\n\nThe write-back instruction in use: clwb, clflushopt, clflush, dc-cvac/civac or "
     "none."},
    {"line_bytes", get_line_bytes, METH_NOARGS, "line_bytes()\n--\n\nBytes of one cache line."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "maru_shm._cxl_flush",
    .m_doc = "Cache-line write-back, invalidation and fence; chosen for this CPU at import.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__cxl_flush(void) {
    choose_instructions();
    return PyModule_Create(&module);
}
