/* The path of a token from a step's message to its consumer, compiled.
 *
 * Each function does what the function of the same name in output_path.py does, and handles the common case here:
 * plain streams, as `GenerationStream.is_plain` defines them, and of their outputs the outputs in DELTA mode. Everything else
 * goes to the Python methods. The state stays in the slots (__slots__) of the Python objects, which are read and written
 * at the offsets that `configure` looks up.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

#if PY_BIG_ENDIAN
#error "the columns of a message are little-endian: use the path in Python"
#endif

/* The value in a slot, borrowed; NULL if it was never set. */
#define SLOT(object, offset) (*(PyObject **)((char *)(object) + (offset)))

static struct {
    Py_ssize_t is_live, token_ids, finish, num_taken, num_read, append_text, byte_text, index;
} completion_;
static struct {
    Py_ssize_t is_plain, is_delta, first, error, request_id, prompt, prompt_token_ids, metrics, num_cached_tokens, group,
        is_ready, waiter, wake_ups, has_logprobs;
} stream_;
static Py_ssize_t group_streams, group_waiter, wake_ups_waiters, text_held, text_texts, text_bytes, metrics_first, metrics_last;
static PyTypeObject *stream_type, *byte_text_type;
static PyObject *request_output, *completion_output;
static PyObject *get_running_loop;
static PyObject *str_arrival, *str_blocking, *str_close, *str_create_future, *str_has_news, *str_take,
    *str_next, *str_take_from;

static void set_slot(PyObject *object, Py_ssize_t offset, PyObject *value) {
    PyObject *old = SLOT(object, offset);
    Py_INCREF(value);
    SLOT(object, offset) = value;
    Py_XDECREF(old);
}

static Py_ssize_t offset_of(PyObject *type, const char *name) {
    PyObject *descriptor = PyObject_GetAttrString(type, name);
    Py_ssize_t offset = -1;
    if (descriptor == NULL) return -1;
    if (Py_TYPE(descriptor) == &PyMemberDescr_Type) {
        PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
        if (member->type == T_OBJECT_EX && !(member->flags & READONLY)) offset = member->offset;
    }
    Py_DECREF(descriptor);
    if (offset < 0) PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
    return offset;
}

/* The fields of RequestOutput, in order, that `simple_output` gives. */
static const char *const output_fields[] = {"request_id",     "prompt",   "prompt_token_ids", "prompt_logprobs",
                                            "outputs",        "finished", "metrics",          "lora_request",
                                            "encoder_prompt", "encoder_prompt_token_ids",     "num_cached_tokens"};
#define NUM_OUTPUT_FIELDS ((Py_ssize_t)(sizeof output_fields / sizeof output_fields[0]))

/* Raise TypeError unless the fields of RequestOutput begin with `output_fields`. */
static int check_output_fields(PyObject *names) {
    for (Py_ssize_t i = 0; i < NUM_OUTPUT_FIELDS; i++) {
        if (i < PyTuple_GET_SIZE(names) &&
            PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), output_fields[i]) == 0)
            continue;
        PyErr_Format(PyExc_TypeError, "field %zd of RequestOutput is not %s", i, output_fields[i]);
        return -1;
    }
    return 0;
}

/* configure(Completion, GenerationStream, ReadyStreams, WakeUps, ByteText, RequestMetrics, RequestOutput,
 *           the names of RequestOutput's fields, CompletionOutput) */
static PyObject *configure(PyObject *module, PyObject *args) {
    PyObject *completion, *stream, *group, *wake_ups, *text, *metrics, *output, *names, *part;
    if (!PyArg_ParseTuple(args, "OOOOOOOO!O", &completion, &stream, &group, &wake_ups, &text, &metrics, &output,
                          &PyTuple_Type, &names, &part))
        return NULL;
    if (check_output_fields(names) < 0) return NULL;
    struct {
        PyObject *type;
        const char *name;
        Py_ssize_t *offset;
    } slots[] = {
        {completion, "is_live", &completion_.is_live},
        {completion, "token_ids", &completion_.token_ids},
        {completion, "finish", &completion_.finish},
        {completion, "_num_taken", &completion_.num_taken},
        {completion, "_num_read", &completion_.num_read},
        {completion, "_append_text", &completion_.append_text},
        {completion, "_byte_text", &completion_.byte_text},
        {completion, "index", &completion_.index},
        {stream, "is_plain", &stream_.is_plain},
        {stream, "_is_delta", &stream_.is_delta},
        {stream, "_first", &stream_.first},
        {stream, "error", &stream_.error},
        {stream, "request_id", &stream_.request_id},
        {stream, "prompt", &stream_.prompt},
        {stream, "prompt_token_ids", &stream_.prompt_token_ids},
        {stream, "_metrics", &stream_.metrics},
        {stream, "num_cached_tokens", &stream_.num_cached_tokens},
        {stream, "group", &stream_.group},
        {stream, "is_ready", &stream_.is_ready},
        {stream, "_waiter", &stream_.waiter},
        {stream, "wake_ups", &stream_.wake_ups},
        {stream, "has_logprobs", &stream_.has_logprobs},
        {group, "_streams", &group_streams},
        {group, "_waiter", &group_waiter},
        {wake_ups, "_waiters", &wake_ups_waiters},
        {text, "_held", &text_held},
        {text, "_texts", &text_texts},
        {text, "_token_bytes", &text_bytes},
        {metrics, "first_token_time", &metrics_first},
        {metrics, "last_token_time", &metrics_last},
    };
    for (size_t i = 0; i < sizeof slots / sizeof slots[0]; i++)
        if ((*slots[i].offset = offset_of(slots[i].type, slots[i].name)) < 0) return NULL;
    stream_type = (PyTypeObject *)Py_NewRef(stream);
    byte_text_type = (PyTypeObject *)Py_NewRef(text);
    request_output = Py_NewRef(output);
    completion_output = Py_NewRef(part);
    Py_RETURN_NONE;
}

/* Leave a future, if a consumer waits for it, to the wake-ups of the stream. */
static int wake_later(PyObject *stream, PyObject *owner, Py_ssize_t offset) {
    PyObject *waiter = SLOT(owner, offset);
    if (waiter == Py_None) return 0;
    if (PyList_Append(SLOT(SLOT(stream, stream_.wake_ups), wake_ups_waiters), waiter) < 0) return -1;
    set_slot(owner, offset, Py_None);
    return 0;
}

static int wake_group(PyObject *stream, PyObject *group) {
    if (SLOT(stream, stream_.is_ready) == Py_True) return 0;
    set_slot(stream, stream_.is_ready, Py_True);
    if (PyList_Append(SLOT(group, group_streams), stream) < 0) return -1;
    return wake_later(stream, group, group_waiter);
}

/* Announce a new token of a plain stream. */
static int wake(PyObject *stream, PyObject *now) {
    PyObject *metrics = SLOT(stream, stream_.metrics), *group = SLOT(stream, stream_.group);
    set_slot(metrics, metrics_last, now);
    if (SLOT(metrics, metrics_first) == Py_None) set_slot(metrics, metrics_first, now);
    return group == Py_None ? wake_later(stream, stream, stream_.waiter) : wake_group(stream, group);
}

/* Give a token to the completion of `entry`, as the body of the loop in `take_in` in Python does. */
static int take_in_token(PyObject *entry, uint32_t token, uint16_t position, PyObject *now, PyObject *others,
                         PyObject *lost) {
    PyObject *stream = PyTuple_GET_ITEM(entry, 0), *completion = PyTuple_GET_ITEM(entry, 1);
    if (!PyObject_TypeCheck(stream, stream_type) || SLOT(completion, completion_.is_live) != Py_True) return 0;
    PyObject *token_ids = SLOT(completion, completion_.token_ids);
    uint16_t ahead = (uint16_t)(position - (uint16_t)PyList_GET_SIZE(token_ids));
    if (ahead == 0) {
        PyObject *value = PyLong_FromUnsignedLong(token);
        int error = value == NULL ? -1 : PyList_Append(token_ids, value);
        Py_XDECREF(value);
        if (error) return -1;
        return SLOT(stream, stream_.is_plain) == Py_True ? wake(stream, now) : PyList_Append(others, entry);
    }
    if (ahead >= 0x8000) return 0; /* the token was received before */
    set_slot(completion, completion_.is_live, Py_False);
    return PyList_Append(lost, entry);
}

/* take_in(entries, slots, tokens, positions, now) -> (others, lost) */
static PyObject *take_in(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5 || !PyList_Check(args[0]) || !PyBytes_Check(args[1]) || !PyBytes_Check(args[2]) ||
        !PyBytes_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "take_in needs a list, three bytes and a time");
        return NULL;
    }
    PyObject *entries = args[0];
    const void *slots = PyBytes_AS_STRING(args[1]); /* bytes are aligned for numbers of any size */
    const uint32_t *tokens = (const void *)PyBytes_AS_STRING(args[2]);
    const uint16_t *positions = (const void *)PyBytes_AS_STRING(args[3]);
    Py_ssize_t slot_bytes = PyBytes_GET_SIZE(args[1]), count = PyBytes_GET_SIZE(args[2]) / 4;
    if (PyBytes_GET_SIZE(args[2]) != 4 * count || PyBytes_GET_SIZE(args[3]) != 2 * count ||
        (slot_bytes != 2 * count && slot_bytes != 4 * count)) {
        PyErr_Format(PyExc_ValueError,
                     "the columns disagree: %zd bytes of slots, %zd of tokens, %zd of positions", slot_bytes,
                     PyBytes_GET_SIZE(args[2]), PyBytes_GET_SIZE(args[3]));
        return NULL;
    }
    int wide = slot_bytes != 2 * count;
    PyObject *others = PyList_New(0), *lost = PyList_New(0);
    if (others == NULL || lost == NULL) goto failed;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t slot = wide ? ((const uint32_t *)slots)[i] : ((const uint16_t *)slots)[i];
        if ((Py_ssize_t)slot >= PyList_GET_SIZE(entries)) continue;
        PyObject *entry = PyList_GET_ITEM(entries, slot);
        if (!PyTuple_Check(entry)) continue; /* a free slot */
        /* An allocation may run the garbage collector, and a finalizer may free the entry. */
        Py_INCREF(entry);
        int error = take_in_token(entry, tokens[i], positions[i], args[4], others, lost);
        Py_DECREF(entry);
        if (error) goto failed;
    }
    PyObject *result = PyTuple_Pack(2, others, lost);
    Py_DECREF(others);
    Py_DECREF(lost);
    return result;
failed:
    Py_XDECREF(others);
    Py_XDECREF(lost);
    return NULL;
}

/* Return the text of a token as `ByteText.append` does; NULL without an exception if its bytes are not known yet. */
static PyObject *byte_text_of(PyObject *text, PyObject *token) {
    PyObject *held = SLOT(text, text_held);
    if (PyBytes_GET_SIZE(held) == 0) {
        PyObject *whole = PyDict_GetItemWithError(SLOT(text, text_texts), token);
        if (whole != NULL && whole != Py_None) return Py_NewRef(whole);
    }
    PyObject *bytes = PyErr_Occurred() ? NULL : PyDict_GetItemWithError(SLOT(text, text_bytes), token);
    if (bytes == NULL) return NULL;
    PyObject *data = Py_NewRef(held), *result = NULL, *rest = NULL;
    PyBytes_Concat(&data, bytes);
    if (data == NULL) return NULL;
    Py_ssize_t size = PyBytes_GET_SIZE(data);
    Py_ssize_t num_read = size; /* Python 3.11.2 leaves it as it is if all bytes are ASCII */
    result = PyUnicode_DecodeUTF8Stateful(PyBytes_AS_STRING(data), size, "replace", &num_read);
    if (result != NULL) rest = PyBytes_FromStringAndSize(PyBytes_AS_STRING(data) + num_read, size - num_read);
    Py_DECREF(data);
    if (rest == NULL) Py_CLEAR(result);
    if (result != NULL) set_slot(text, text_held, rest);
    Py_XDECREF(rest);
    return result;
}

static PyObject *new_text(PyObject *completion, PyObject *new_ids) {
    PyObject *text = SLOT(completion, completion_.byte_text);
    if (PyList_GET_SIZE(new_ids) == 1 && Py_IS_TYPE(text, byte_text_type)) {
        PyObject *result = byte_text_of(text, PyList_GET_ITEM(new_ids, 0));
        if (result != NULL || PyErr_Occurred()) return result;
    }
    return PyObject_CallOneArg(SLOT(completion, completion_.append_text), new_ids);
}

/* Return whether `stream` is plain and has not ended: then a new token is its only news. */
static int is_simple(PyObject *stream) {
    return Py_IS_TYPE(stream, stream_type) && SLOT(stream, stream_.is_plain) == Py_True &&
           SLOT(stream, stream_.error) == Py_None &&
           SLOT(SLOT(stream, stream_.first), completion_.finish) == Py_None;
}

/* Return the next output of a simple stream; NULL without an exception if it has no new token. */
static PyObject *simple_output(PyObject *stream) {
    PyObject *completion = SLOT(stream, stream_.first), *token_ids = SLOT(completion, completion_.token_ids);
    Py_ssize_t count = PyList_GET_SIZE(token_ids);
    Py_ssize_t start = PyLong_AsSsize_t(SLOT(completion, completion_.num_taken));
    if (start >= count) return NULL;
    if (SLOT(stream, stream_.is_delta) != Py_True) return PyObject_CallMethodNoArgs(stream, str_take);
    PyObject *result = NULL, *text = NULL, *output = NULL, *outputs = NULL, *taken = NULL;
    PyObject *new_ids = PyList_GetSlice(token_ids, start, count);
    if (new_ids == NULL) return NULL;
    if ((text = new_text(completion, new_ids)) == NULL) goto done;
    if ((taken = PyLong_FromSsize_t(count)) == NULL) goto done;
    set_slot(completion, completion_.num_taken, taken);
    set_slot(completion, completion_.num_read, taken);
    PyObject *inner[] = {SLOT(completion, completion_.index), text, new_ids};
    if ((output = PyObject_Vectorcall(completion_output, inner, 3, NULL)) == NULL) goto done;
    if ((outputs = PyList_New(1)) == NULL) goto done;
    PyList_SET_ITEM(outputs, 0, Py_NewRef(output));
    /* Neither list can be part of a cycle. Visiting them would cost the garbage collector more than making them. */
    PyObject_GC_UnTrack(new_ids);
    PyObject_GC_UnTrack(outputs);
    PyObject *outer[] = {SLOT(stream, stream_.request_id),
                         SLOT(stream, stream_.prompt),
                         SLOT(stream, stream_.prompt_token_ids),
                         Py_None,
                         outputs,
                         Py_False,
                         SLOT(stream, stream_.metrics),
                         Py_None,
                         Py_None,
                         Py_None,
                         SLOT(stream, stream_.num_cached_tokens)};
    result = PyObject_Vectorcall(request_output, outer, NUM_OUTPUT_FIELDS, NULL);
done:
    Py_DECREF(new_ids);
    Py_XDECREF(text);
    Py_XDECREF(taken);
    Py_XDECREF(output);
    Py_XDECREF(outputs);
    return result;
}

/* take_outputs(streams, otherwise) -> outputs */
static PyObject *take_outputs(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "take_outputs needs a list and a function");
        return NULL;
    }
    PyObject *outputs = PyList_New(0);
    if (outputs == NULL) return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *stream = PyList_GET_ITEM(args[0], i), *output;
        if (is_simple(stream)) {
            set_slot(stream, stream_.is_ready, Py_False);
            output = simple_output(stream);
            if (output == NULL && !PyErr_Occurred()) continue;
        } else {
            output = PyObject_CallOneArg(args[1], stream);
            if (output == Py_None) {
                Py_DECREF(output);
                continue;
            }
        }
        int error = output == NULL ? -1 : PyList_Append(outputs, output);
        Py_XDECREF(output);
        if (error) {
            Py_DECREF(outputs);
            return NULL;
        }
    }
    return outputs;
}

#include "next_output.h"

static PyMethodDef methods[] = {
    {"configure", configure, METH_VARARGS, "Look up the slots of the classes."},
    {"take_in", (PyCFunction)(void (*)(void))take_in, METH_FASTCALL, "See output_path.py."},
    {"take_outputs", (PyCFunction)(void (*)(void))take_outputs, METH_FASTCALL, "See output_path.py."},
    {"next_output", (PyCFunction)(void (*)(void))next_output, METH_FASTCALL, "See output_path.py."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_output_path", NULL, -1, methods};

PyMODINIT_FUNC PyInit__output_path(void) {
    str_arrival = PyUnicode_InternFromString("arrival");
    str_blocking = PyUnicode_InternFromString("_asyncio_future_blocking");
    str_close = PyUnicode_InternFromString("_close");
    str_create_future = PyUnicode_InternFromString("create_future");
    str_has_news = PyUnicode_InternFromString("has_news");
    str_next = PyUnicode_InternFromString("_next");
    str_take = PyUnicode_InternFromString("take");
    str_take_from = PyUnicode_InternFromString("_take_from");
    PyObject *asyncio = PyImport_ImportModule("asyncio");
    if (asyncio == NULL) return NULL;
    get_running_loop = PyObject_GetAttrString(asyncio, "get_running_loop");
    Py_DECREF(asyncio);
    if (get_running_loop == NULL || PyType_Ready(&NextOutput_type) < 0) return NULL;
    return PyModule_Create(&definition);
}
