// Runs a graph whose parts Inductor compiled to C++: one call from Python for all of them.
#include <mutex>
#include <unordered_map>

#include "ops.h"

// Of Python's stable ABI; the process that loads this has it, or nothing here is called.
extern "C" {
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int);
}

namespace {

using qc::Tensor;
// What Inductor writes for a graph: it takes the inputs' handles away, and gives the outputs'.
using Entry = void (*)(AtenTensorHandle* inputs, AtenTensorHandle* outputs);

struct Step {
  Entry entry;
  std::vector<int64_t> inputs, outputs;  // places
  std::vector<bool> last;                // whether an input was made by a step and is not read again
};

// Places hold, in this order, what each call is given, constants, and what steps make.
struct Chain {
  int64_t given = 0, places = 0;
  std::vector<Tensor> constants;
  std::vector<Step> steps;
  std::vector<int64_t> results;
};

// One call: what it was given, the chain's constants, and what its steps have made.
class Run {
 public:
  Run(const Chain& chain, const std::vector<Tensor>& given)
      : chain_(chain), given_(given), made_(static_cast<size_t>(chain.places), nullptr) {}
  Run(const Run&) = delete;
  ~Run() {
    for (AtenTensorHandle handle : made_) {
      if (handle) aoti_torch_delete_tensor_object(handle);
    }
  }

  void step(const Step& step) {
    std::vector<AtenTensorHandle> inputs(step.inputs.size()), outputs(step.outputs.size());
    for (size_t i = 0; i < inputs.size(); i++) {
      inputs[i] = step.last[i] ? take(step.inputs[i]) : copy(step.inputs[i]);
    }
    step.entry(inputs.data(), outputs.data());
    for (size_t i = 0; i < outputs.size(); i++) made(step.outputs[i]) = outputs[i];
  }

  // A further handle of a place's tensor, for who asks.
  AtenTensorHandle copy(int64_t place) {
    const int64_t constant = place - chain_.given;
    const bool is_made = constant >= static_cast<int64_t>(chain_.constants.size());
    const AtenTensorHandle from =
        constant < 0 ? given_[static_cast<size_t>(place)].get()
        : is_made    ? made(place)
                     : chain_.constants[static_cast<size_t>(constant)].get();
    AtenTensorHandle to;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(from, &to));
    return to;
  }

 private:
  AtenTensorHandle& made(int64_t place) { return made_[static_cast<size_t>(place)]; }
  // What a step made, for its last reader: its memory can be used again there.
  AtenTensorHandle take(int64_t place) {
    AtenTensorHandle taken = nullptr;
    std::swap(taken, made(place));
    return taken;
  }

  const Chain& chain_;
  const std::vector<Tensor>& given_;
  std::vector<AtenTensorHandle> made_;
};

// Inductor's code gives Python's lock away for its time, so it has to be held.
class Lock {
 public:
  Lock() : state_(PyGILState_Ensure()) {}
  Lock(const Lock&) = delete;
  ~Lock() { PyGILState_Release(state_); }

 private:
  int state_;
};

// Chains by number.
std::mutex guard;
std::unordered_map<int64_t, std::shared_ptr<Chain>> chains;
int64_t next_number = 1;

class Reader {
 public:
  explicit Reader(const std::vector<int64_t>& numbers) : numbers_(numbers) {}
  int64_t next() {
    STD_TORCH_CHECK(at_ < numbers_.size(), "qcompile_cpu: a chain ends too soon");
    return numbers_[at_++];
  }
  std::vector<int64_t> list(int64_t places) {
    std::vector<int64_t> all(static_cast<size_t>(next()));
    for (int64_t& place : all) {
      place = next();
      STD_TORCH_CHECK(place >= 0 && place < places, "qcompile_cpu: a chain has no place ", place);
    }
    return all;
  }

 private:
  const std::vector<int64_t>& numbers_;
  size_t at_ = 0;
};

// `numbers`: how much a call is given; places; results; steps; for each step its entry's address,
// inputs, outputs, and 1 or 0 for each input. Lists begin with their lengths.
int64_t chain_make(const std::vector<Tensor>& constants, const std::vector<int64_t>& numbers) {
  auto chain = std::make_shared<Chain>();
  Reader read(numbers);
  chain->given = read.next();
  chain->places = read.next();
  chain->constants = constants;
  chain->results = read.list(chain->places);
  for (int64_t left = read.next(); left > 0; left--) {
    Step step;
    step.entry = reinterpret_cast<Entry>(read.next());
    step.inputs = read.list(chain->places);
    step.outputs = read.list(chain->places);
    for (size_t i = 0; i < step.inputs.size(); i++) step.last.push_back(read.next() != 0);
    chain->steps.push_back(std::move(step));
  }
  const std::lock_guard<std::mutex> hold(guard);
  chains[next_number] = chain;
  return next_number++;
}

void chain_drop(int64_t number) {
  std::unordered_map<int64_t, std::shared_ptr<Chain>>::node_type dropped;
  const std::lock_guard<std::mutex> hold(guard);
  // Its constants go after the lock: freeing them may run Python code, which may drop another.
  dropped = chains.extract(number);
}

std::vector<Tensor> chain_run(const std::vector<Tensor>& given, int64_t number) {
  std::shared_ptr<Chain> chain;
  {
    const std::lock_guard<std::mutex> hold(guard);
    chain = chains.at(number);
  }
  STD_TORCH_CHECK(static_cast<int64_t>(given.size()) == chain->given,
                  "qcompile_cpu: a chain takes ", chain->given, " tensors");
  Run run(*chain, given);
  {
    const Lock lock;
    for (const Step& step : chain->steps) run.step(step);
  }
  std::vector<Tensor> results;
  for (int64_t place : chain->results) results.emplace_back(run.copy(place));
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(qcompile_cpu, CompositeExplicitAutograd, m) {
  m.impl("chain_make", TORCH_BOX(&chain_make));
  m.impl("chain_drop", TORCH_BOX(&chain_drop));
  m.impl("chain_run", TORCH_BOX(&chain_run));
}
