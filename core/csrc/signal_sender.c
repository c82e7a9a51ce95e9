/* Notes whether another process sent the signal that ends this one, as only a signal handler can know. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <signal.h>
#include <stdint.h>
#include <unistd.h>

static const int FATAL[] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL};
static struct sigaction former[NSIG];
static Py_buffer page; /* held until the process ends */
static volatile int64_t *note;

/* Calls only functions that are safe in a signal handler. */
static void handle(int number, siginfo_t *info, void *context) {
    (void)context;
    int was_sent = info->si_code <= 0; /* by a process: the kernel's own signals, such as faults, have codes above 0 */
    if (was_sent && info->si_pid != getpid()) *note = number;
    sigaction(number, &former[number], NULL);
    if (was_sent) raise(number); /* a fault comes again by itself, when the instruction is repeated */
}

static PyObject *note_in(PyObject *module, PyObject *args) {
    (void)module;
    if (note != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "signals are noted already");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "w*", &page)) return NULL;
    if (page.len != sizeof(int64_t)) {
        PyBuffer_Release(&page);
        PyErr_SetString(PyExc_ValueError, "the note must be one 64-bit integer");
        return NULL;
    }
    note = page.buf;
    struct sigaction action = {.sa_flags = SA_SIGINFO};
    action.sa_sigaction = handle;
    for (size_t i = 0; i < sizeof(FATAL) / sizeof(*FATAL); i++) sigaction(FATAL[i], &action, &former[FATAL[i]]);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"note_in", note_in, METH_VARARGS, "Write the number of a fatal signal that another process sends to the int64."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_signal_sender", NULL, -1, methods};

PyMODINIT_FUNC PyInit__signal_sender(void) { return PyModule_Create(&definition); }
