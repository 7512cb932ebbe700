// Browsers start no worker in a page that is opened as a file. The search is the only worker of the site: its program runs
// in a hidden frame then, which has the interface of a worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.frame = frame;
      this.loaded = new Promise((resolve) => {
        frame.onload = () => {
          // What the program posts goes to the page.
          frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = frame.contentDocument.createElement("script");
          script.src = new URL(url, location);
          script.onload = resolve;
          frame.contentDocument.body.append(script);
        };
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
