/* Prints what the kernel half reads of CPython, by the interpreter's own headers. */
#define Py_BUILD_CORE 1
#include <Python.h>
#include <stddef.h>
#include <stdio.h>
#if PY_VERSION_HEX >= 0x030E0000
#include <internal/pycore_interpframe.h>
#elif PY_VERSION_HEX >= 0x030B0000
#include <internal/pycore_frame.h>
#else
#include <frameobject.h>
#endif
#if PY_VERSION_HEX >= 0x03090000
#include <internal/pycore_interp.h>
#include <internal/pycore_runtime.h>
#else
#include <internal/pycore_pystate.h>
#endif

#define NONE 0xffffffffu
#define SHOW(name, value) printf("%s %u\n", name, (unsigned)(value))

int main(void) {
    SHOW("interpreters_head", offsetof(_PyRuntimeState, interpreters.head));
    SHOW("interpreter_next", offsetof(PyInterpreterState, next));
    SHOW("thread_next", offsetof(PyThreadState, next));
    SHOW("thread_interp", offsetof(PyThreadState, interp));
    SHOW("thread_id", offsetof(PyThreadState, thread_id));
#if PY_VERSION_HEX >= 0x030B0000
    SHOW("interpreter_threads", offsetof(PyInterpreterState, threads.head));
    SHOW("frame_previous", offsetof(_PyInterpreterFrame, previous));
    SHOW("code_name", offsetof(PyCodeObject, co_qualname));
    SHOW("code_lines", offsetof(PyCodeObject, co_linetable));
    SHOW("code_start", offsetof(PyCodeObject, co_code_adaptive));
    SHOW("instruction_is_index", 0);
#else
    SHOW("interpreter_threads", offsetof(PyInterpreterState, tstate_head));
    SHOW("frame_previous", offsetof(PyFrameObject, f_back));
    SHOW("frame_code", offsetof(PyFrameObject, f_code));
    SHOW("frame_instruction", offsetof(PyFrameObject, f_lasti));
    SHOW("frame_owner", NONE);
    SHOW("shim_owner", 255);
    SHOW("thread_frame", offsetof(PyThreadState, frame));
    SHOW("cframe_current", NONE);
    SHOW("code_name", offsetof(PyCodeObject, co_name));
#if PY_VERSION_HEX >= 0x030A0000
    SHOW("code_lines", offsetof(PyCodeObject, co_linetable));
#else
    SHOW("code_lines", offsetof(PyCodeObject, co_lnotab));
#endif
    SHOW("code_start", NONE);
    SHOW("instruction_is_index", 1);
#endif
#if PY_VERSION_HEX >= 0x030D0000
    SHOW("thread_frame", offsetof(PyThreadState, current_frame));
    SHOW("cframe_current", NONE);
    SHOW("frame_code", offsetof(_PyInterpreterFrame, f_executable));
    SHOW("frame_instruction", offsetof(_PyInterpreterFrame, instr_ptr));
#elif PY_VERSION_HEX >= 0x030B0000
    SHOW("thread_frame", offsetof(PyThreadState, cframe));
    SHOW("cframe_current", offsetof(_PyCFrame, current_frame));
    SHOW("frame_code", offsetof(_PyInterpreterFrame, f_code));
    SHOW("frame_instruction", offsetof(_PyInterpreterFrame, prev_instr));
#endif
#if PY_VERSION_HEX >= 0x030C0000
    SHOW("frame_owner", offsetof(_PyInterpreterFrame, owner));
#if PY_VERSION_HEX >= 0x030E0000
    SHOW("shim_owner", FRAME_OWNED_BY_INTERPRETER);
#else
    SHOW("shim_owner", FRAME_OWNED_BY_CSTACK);
#endif
#elif PY_VERSION_HEX >= 0x030B0000
    SHOW("frame_owner", offsetof(_PyInterpreterFrame, is_entry));
    SHOW("shim_owner", 255);
#endif
#if PY_VERSION_HEX >= 0x030A0000 && PY_VERSION_HEX < 0x030D0000
    SHOW("thread_cframe", offsetof(PyThreadState, cframe));
#if PY_VERSION_HEX >= 0x030B0000
    SHOW("cframe_previous", offsetof(_PyCFrame, previous));
#else
    SHOW("cframe_previous", offsetof(CFrame, previous));
#endif
#else
    SHOW("thread_cframe", NONE);
    SHOW("cframe_previous", NONE);
#endif
    SHOW("code_first_line", offsetof(PyCodeObject, co_firstlineno));
    SHOW("code_file", offsetof(PyCodeObject, co_filename));
    SHOW("text_length", offsetof(PyASCIIObject, length));
    SHOW("text_hash", offsetof(PyASCIIObject, hash));
    SHOW("text_state", offsetof(PyASCIIObject, state));
    SHOW("text_ascii", sizeof(PyASCIIObject));
    SHOW("text_compact", sizeof(PyCompactUnicodeObject));
    SHOW("bytes_size", offsetof(PyVarObject, ob_size));
    SHOW("bytes_data", offsetof(PyBytesObject, ob_sval));
    SHOW("object_type", offsetof(PyObject, ob_type));
#ifdef Py_GIL_DISABLED
    SHOW("free_threaded_at", offsetof(_Py_DebugOffsets, free_threaded));
    SHOW("free_threaded", _Py_Debug_Free_Threaded);
#endif
    return 0;
}
